//! The hours in which a rule is swept.

use super::Invalid;
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

const DAYS: [&str; 7] = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
const DAY: u32 = 24 * 3600;

/// A span of local time on some days of the week: `Mon-Fri 22:00-06:00 Europe/Paris`.
///
/// It follows the wall clock. A window that begins in the evening and ends in the morning belongs to the day it begins
/// on. An hour skipped when clocks are set forward does not exist, and a repeated hour counts twice.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Window {
    /// The days of the week, starting with Monday.
    days: [bool; 7],
    /// Seconds of the day; `start` is before `end` unless the window runs into the next day.
    start: u32,
    end: u32,
    /// `None` means the rule's own time zone.
    zone: Option<String>,
}

/// Whether a window is open at some local time, and in how many seconds of local time that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    pub is_open: bool,
    pub changes_in: u32,
}

impl Window {
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        Self::read(text).ok_or_else(|| Invalid::Window(text.into()))
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().peekable();
        let days = match words.next_if(|word| word.starts_with(|first: char| first.is_ascii_alphabetic())) {
            Some(days) => read_days(days)?,
            None => [true; 7],
        };
        let (start, end) = words.next()?.split_once('-')?;
        let (start, end) = (read_time(start)?, read_time(end)?);
        let zone = words.next().map(str::to_owned);
        let is_a_span = start != end && start < DAY;
        (is_a_span && words.next().is_none()).then_some(Self { days, start, end, zone })
    }

    pub fn zone(&self) -> Option<&str> {
        self.zone.as_deref()
    }

    /// Returns the state of the window on a day of the week (Monday is 1), this many seconds after midnight.
    pub fn at(&self, day: u32, second: u32) -> Opening {
        let (today, yesterday) = ((day + 6) as usize % 7, (day + 5) as usize % 7);
        let goes_on = self.end <= self.start;
        if goes_on && self.days[yesterday] && second < self.end {
            return Opening { is_open: true, changes_in: self.end - second };
        }
        let end = if goes_on { DAY + self.end } else { self.end };
        if self.days[today] && second >= self.start && second < end {
            return Opening { is_open: true, changes_in: end - second };
        }
        // Within a week at the latest, because at least one day is set.
        let begins = (0..=7).filter(|ahead| self.days[(today + ahead) % 7]);
        let mut starts = begins.map(|ahead| ahead as u32 * DAY + self.start);
        let next = starts.find(|start| *start > second).unwrap_or(second + DAY);
        Opening { is_open: false, changes_in: next - second }
    }
}

impl TryFrom<String> for Window {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        Self::parse(&text)
    }
}

/// Reads `Mon-Fri,Sun`; a range may wrap around the end of the week.
fn read_days(text: &str) -> Option<[bool; 7]> {
    let number = |name: &str| DAYS.iter().position(|day| day.eq_ignore_ascii_case(name));
    let mut days = [false; 7];
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        for ahead in 0..=(last + 7 - first) % 7 {
            days[(first + ahead) % 7] = true;
        }
    }
    Some(days)
}

/// Reads `HH:MM` or `HH:MM:SS`, up to `24:00`.
fn read_time(text: &str) -> Option<u32> {
    let fields: Vec<_> = text.split(':').collect();
    if !(2..=3).contains(&fields.len())
        || fields.iter().any(|field| field.len() != 2 || !field.bytes().all(|byte| byte.is_ascii_digit()))
    {
        return None;
    }
    let fields: Vec<u32> = fields.iter().map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let (minute, second) = (fields[1], fields.get(2).copied().unwrap_or(0));
    let time = fields[0] * 3600 + minute * 60 + second;
    (minute < 60 && second < 60 && time <= DAY).then_some(time)
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.days != [true; 7] {
            let days: Vec<_> = DAYS.iter().zip(self.days).filter(|(_, on)| *on).map(|(day, _)| *day).collect();
            write!(f, "{} ", days.join(","))?;
        }
        let time = |time: u32| {
            let seconds = if time.is_multiple_of(60) { String::new() } else { format!(":{:02}", time % 60) };
            format!("{:02}:{:02}{seconds}", time / 3600, time / 60 % 60)
        };
        write!(f, "{}-{}", time(self.start), time(self.end))?;
        self.zone.iter().try_for_each(|zone| write!(f, " {zone}"))
    }
}

impl Serialize for Window {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR: u32 = 3600;

    fn opening(window: &str, day: u32, second: u32) -> Opening {
        Window::parse(window).expect("a window").at(day, second)
    }

    #[test]
    fn a_window_is_open_from_its_first_second_to_the_one_before_its_end() {
        let at = |second| opening("09:00-17:00", 3, second);
        assert_eq!(at(9 * HOUR - 1), Opening { is_open: false, changes_in: 1 });
        assert_eq!(at(9 * HOUR), Opening { is_open: true, changes_in: 8 * HOUR });
        assert_eq!(at(17 * HOUR - 1), Opening { is_open: true, changes_in: 1 });
        assert_eq!(at(17 * HOUR), Opening { is_open: false, changes_in: 16 * HOUR });
    }

    #[test]
    fn across_midnight_it_belongs_to_the_day_it_begins_on() {
        let at = |day, hour| opening("Mon-Fri 22:00-06:00", day, hour * HOUR);
        assert!(at(5, 23).is_open && at(6, 5).is_open, "Friday night");
        assert!(!at(6, 23).is_open && !at(7, 5).is_open, "Saturday night");
        assert!(!at(1, 5).is_open, "Sunday night");
        assert_eq!(at(6, 6), Opening { is_open: false, changes_in: 64 * HOUR }, "until Monday evening");
        assert_eq!(at(1, 22), Opening { is_open: true, changes_in: 8 * HOUR });
    }

    #[test]
    fn a_single_day_comes_again_in_a_week() {
        assert_eq!(opening("Sun 01:00-02:00", 7, 2 * HOUR), Opening { is_open: false, changes_in: 167 * HOUR });
        assert!(opening("Sat-Mon 00:00-24:00", 7, 0).is_open);
        assert!(!opening("Sat-Mon 00:00-24:00", 2, 0).is_open);
    }

    #[test]
    fn it_is_printed_as_it_is_read() {
        for text in ["22:00-06:00", "Mon,Tue,Sun 00:00-24:00 UTC", "Sat 23:59:59-00:00:01 America/New_York"] {
            assert_eq!(Window::parse(text).map(|window| window.to_string()), Ok(text.into()));
        }
        assert_eq!(Window::parse("fri-mon 1:00-2:00"), Err(Invalid::Window("fri-mon 1:00-2:00".into())));
        assert_eq!(
            Window::parse("fri-mon 01:00-02:00").map(|w| w.to_string()),
            Ok("Mon,Fri,Sat,Sun 01:00-02:00".into())
        );
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "always",
            "22:00",
            "22:00-22:00",
            "24:00-01:00",
            "25:00-26:00",
            "01:60-02:00",
            "Foo 01:00-02:00",
            "01:00-02:00 UTC too",
            "01:00 - 02:00",
            "+1:00-02:00",
            "1-2",
            "01:00-02:00:00:00",
        ] {
            assert_eq!(Window::parse(text), Err(Invalid::Window(text.into())));
        }
    }

    proptest! {
        #[test]
        fn whatever_is_read_is_written_so_that_it_can_be_read(
            text: String, near in "([A-Za-z,-]{0,12} )?[0-9]{0,2}:[0-9:]{0,5}-[0-9]{0,2}:[0-9:]{0,5}( [A-Za-z/]{0,12})?",
        ) {
            for text in [text, near] {
                if let Ok(window) = Window::parse(&text) {
                    prop_assert_eq!(Window::parse(&window.to_string()), Ok(window));
                }
            }
        }

        #[test]
        fn every_change_is_a_change(days in 1..128_u8, start in 0..DAY, end in 0..=DAY, day in 1..=7_u32, second in 0..DAY) {
            prop_assume!(start != end);
            let window = Window { days: std::array::from_fn(|day| days >> day & 1 == 1), start, end, zone: None };
            let now = window.at(day, second);
            let at = |ahead: u32| window.at((day - 1 + (second + ahead) / DAY) % 7 + 1, (second + ahead) % DAY).is_open;
            prop_assert!(now.changes_in > 0 && now.changes_in <= 8 * DAY);
            prop_assert_eq!(at(now.changes_in - 1), now.is_open);
            // The window stays open where one day's window ends and the next day's begins.
            prop_assert!(now.is_open || at(now.changes_in));
            prop_assert_eq!(Window::parse(&window.to_string()), Ok(window));
        }
    }
}
