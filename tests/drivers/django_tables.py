"""Django's inspectdb lists the tables of the search path: nothing of ours, if the extension has a schema of its own."""

import sys

import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "HOST": sys.argv[1], "NAME": sys.argv[2], "USER": "postgres"}},
    INSTALLED_APPS=[],
)
django.setup()

from django.db import DatabaseError, connection, models  # noqa: E402


class Cart(models.Model):
    last_seen = models.DateTimeField(null=True)

    class Meta:
        app_label = "shop"
        db_table = "carts"
        indexes = [models.Index(fields=["last_seen"], name="idx_ttl_carts_last_seen")]


with connection.cursor() as cursor:
    cursor.execute("CREATE SCHEMA ttl; CREATE EXTENSION pg_ttl_index SCHEMA ttl")
with connection.schema_editor() as editor:
    editor.create_model(Cart)
with connection.cursor() as cursor:
    cursor.execute("SELECT ttl.ttl_create_index('carts', 'last_seen', '30 minutes')")
    cursor.execute("SELECT index_name FROM ttl.ttl_summary")
    assert cursor.fetchone() == ("idx_ttl_carts_last_seen",)
    assert connection.introspection.table_names(cursor) == ["carts"]

cart = Cart.objects.create()
Cart.objects.all().delete()
try:
    cart.save(force_update=True)
    raise AssertionError("an update of a row that is gone succeeded")
except DatabaseError:
    pass
# Without force_update, Django inserts what it cannot update.
cart.save()
assert Cart.objects.count() == 1
print("django", django.get_version())
