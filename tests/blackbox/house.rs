//! The house of `docs/architecture.md`: no room reaches up, and `unsafe` lives in one.

use std::fs;
use std::path::{Path, PathBuf};

/// From the ground up. A room uses those on the floors below it.
const FLOORS: [&[&str]; 11] = [
    &["rule"],
    &["error"],
    &["pg"],
    &["guc"],
    &["catalog"],
    &["cascade", "sandbox", "table"],
    &["delivery"],
    &["index"],
    &["row", "sweep", "visibility"],
    &["registry", "worker"],
    &["api"],
];

fn floor_of(room: &str) -> Option<usize> {
    FLOORS.iter().position(|rooms| rooms.contains(&room))
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// Every source but `lib.rs`, with the name of its room.
fn rooms() -> Vec<(String, PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src");
    let mut files = sources(&root);
    files.retain(|path| path.extension().is_some_and(|kind| kind == "rs") && !path.ends_with("lib.rs"));
    files
        .into_iter()
        .map(|path| {
            let first = path.strip_prefix(&root).expect("below src").components().next().expect("a name");
            let room = first.as_os_str().to_str().expect("UTF-8").trim_end_matches(".rs").to_owned();
            let text = fs::read_to_string(&path).expect("a source");
            (room, path, text)
        })
        .collect()
}

/// The rooms that a source names.
fn named(text: &str) -> Vec<String> {
    let name = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    text.match_indices("crate::")
        .flat_map(|(place, found)| {
            let rest = &text[place + found.len()..];
            match rest.strip_prefix('{') {
                Some(list) => {
                    list.split('}').next().unwrap_or_default().split(',').map(|item| name(item.trim())).collect()
                }
                None => vec![name(rest)],
            }
        })
        .collect()
}

#[test]
fn no_room_reaches_up() {
    for (room, path, text) in rooms() {
        let floor = floor_of(&room).unwrap_or_else(|| panic!("{room} is on no floor"));
        for other in named(&text).into_iter().filter(|other| *other != room) {
            let is_below = floor_of(&other).is_none_or(|other| other < floor);
            assert!(is_below, "{} uses {other}", path.display());
        }
    }
}

#[test]
fn unsafe_lives_in_one_room() {
    for (room, path, text) in rooms().into_iter().filter(|(room, ..)| room != "pg") {
        assert!(!text.contains("unsafe"), "{} of {room}", path.display());
    }
}
