"""Alembic sees what docs/orms.md says: nothing of ours, if the extension has a schema of its own and the model declares the index."""

import sys

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.orm import Session, declarative_base
from sqlalchemy.orm.exc import StaleDataError

Base = declarative_base()


class Login(Base):
    __tablename__ = "logins"
    id = sa.Column(sa.BigInteger, primary_key=True, autoincrement=False)
    last_seen = sa.Column(sa.DateTime(timezone=True))
    visits = sa.Column(sa.Integer)
    __table_args__ = (sa.Index("idx_ttl_logins_last_seen", "last_seen"),)


class Undeclared(declarative_base()):
    __tablename__ = "logins"
    id = sa.Column(sa.BigInteger, primary_key=True, autoincrement=False)
    last_seen = sa.Column(sa.DateTime(timezone=True))
    visits = sa.Column(sa.Integer)


def include_object(thing, name, kind, reflected, compare_to):
    return not (reflected and compare_to is None and kind == "index" and name.startswith("idx_ttl_"))


def differences(connection, metadata, **options):
    return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)


engine = sa.create_engine(f"postgresql+psycopg://postgres@/{sys.argv[2]}?host={sys.argv[1]}")
with engine.begin() as connection:
    connection.execute(sa.text("CREATE SCHEMA ttl; CREATE EXTENSION pg_ttl_index SCHEMA ttl"))
    Base.metadata.create_all(connection)
    connection.execute(sa.text("SELECT ttl.ttl_create_index('logins', 'last_seen', '30 minutes')"))
with engine.connect() as connection:
    # The index that the model declares is the one that the rule uses.
    assert connection.scalar(sa.text("SELECT index_name FROM ttl.ttl_summary")) == "idx_ttl_logins_last_seen"
    assert differences(connection, Base.metadata) == []
    assert [change[0] for change in differences(connection, Undeclared.metadata)] == ["remove_index"]
    assert differences(connection, Undeclared.metadata, include_object=include_object) == []

with Session(engine) as session:
    session.add(Login(id=1, last_seen=sa.func.now(), visits=0))
    session.commit()
    login = session.get(Login, 1)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM logins"))
    login.visits = 1
    try:
        session.commit()
        raise AssertionError("an update of a row that is gone succeeded")
    except StaleDataError:
        session.rollback()
with Session(engine) as session:
    session.merge(Login(id=1, visits=2))
    session.commit()
    assert session.scalar(sa.select(sa.func.count()).select_from(Login)) == 1
print("alembic, sqlalchemy", sa.__version__)
