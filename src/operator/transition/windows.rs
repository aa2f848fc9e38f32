//! When changes of nodes may begin: times that cron expressions open, in the time zone of whoever wrote them.
//!
//! An expression is followed on the clock on the wall. A time that the clock leaves out in spring opens when the clock has
//! gone on by as much; one that it shows twice in autumn opens the first time.

use crds::v1alpha1::MaintenanceWindow;
use cronexpr::{Crontab, MakeTimestamp, parse_crontab};
use k8s_openapi::jiff::{
    SignedDuration, Timestamp,
    civil::DateTime,
    tz::{Offset, TimeZone},
};

/// More than any zone has moved its clock at once (Samoa left out a day in 2011).
const LEAP: SignedDuration = SignedDuration::from_hours(25);
/// More openings than these are not looked at: one a minute for as long as the longest window and a leap.
const OPENINGS: usize = 60 * (168 + 25) + 2;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Windows {
    /// None is named: at any time.
    #[default]
    Always,
    During(Vec<Window>),
    /// What is written cannot be read, and nothing is known of what was written before: better never than at any time.
    Unknown,
}

#[derive(Clone, Debug)]
pub struct Window {
    text: MaintenanceWindow,
    /// On the clock of its zone.
    opens: Crontab,
    duration: SignedDuration,
    zone: TimeZone,
}

/// Two that read the same are the same.
impl PartialEq for Window {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Window {}

/// Why an entry is no window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAWindow {
    #[error("schedule {schedule:?} is not five fields of a cron expression: {why}")]
    Schedule { schedule: String, why: String },
    #[error("schedule {0:?} never opens")]
    Never(String),
    #[error("duration {0:?} is not between 5m and 168h, as in 4h or 1h30m")]
    Duration(String),
    #[error("time zone {0:?} is not in the IANA database, as Europe/Berlin is")]
    TimeZone(String),
}

/// A moment, by the windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Moment {
    Open,
    Closed {
        /// When the next one opens.
        until: Option<Timestamp>,
        /// The same for a person.
        said: String,
    },
}

impl Windows {
    pub fn read(list: &[MaintenanceWindow]) -> Result<Self, NotAWindow> {
        match list {
            [] => Ok(Self::Always),
            list => list.iter().map(Window::read).collect::<Result<_, _>>().map(Self::During),
        }
    }

    pub fn at(&self, now: Timestamp) -> Moment {
        let windows = match self {
            Self::Always => return Moment::Open,
            Self::Unknown => {
                let said =
                    "the maintenance windows cannot be read: correct spec.maintenanceWindows of GPUVirtConfig default";
                return Moment::Closed { until: None, said: said.to_owned() };
            }
            Self::During(windows) => windows,
        };
        let mut next: Option<(Timestamp, &Window)> = None;
        for window in windows {
            match window.last_or_next(now) {
                Some(opens) if opens <= now => return Moment::Open,
                Some(opens) if next.is_none_or(|(first, _)| opens < first) => next = Some((opens, window)),
                Some(_) | None => {}
            }
        }
        let said = match next {
            Some((opens, window)) => format!(
                "outside of every maintenance window: the next one opens on {} ({})",
                opens.to_zoned(window.zone.clone()).strftime("%Y-%m-%d at %H:%M"),
                window.text.time_zone
            ),
            None => "outside of every maintenance window, and none opens any more".to_owned(),
        };
        Moment::Closed { until: next.map(|(opens, _)| opens), said }
    }
}

impl Window {
    fn read(text: &MaintenanceWindow) -> Result<Self, NotAWindow> {
        let MaintenanceWindow { schedule, duration, time_zone } = text;
        let refused = |why: &str| NotAWindow::Schedule { schedule: schedule.clone(), why: why.to_owned() };
        if schedule.split_whitespace().count() != 5 {
            return Err(refused("minute, hour, day of month, month, day of week"));
        }
        let opens = parse_crontab(&format!("{schedule} UTC"));
        let opens = opens.map_err(|error| refused(error.to_string().lines().last().unwrap_or_default().trim()))?;
        let longest = SignedDuration::from_hours(168);
        let duration = duration.parse::<SignedDuration>().ok();
        let duration = duration.filter(|duration| (SignedDuration::from_mins(5)..=longest).contains(duration));
        let window = Self {
            opens,
            duration: duration.ok_or_else(|| NotAWindow::Duration(text.duration.clone()))?,
            zone: TimeZone::get(time_zone).map_err(|_| NotAWindow::TimeZone(time_zone.clone()))?,
            text: text.clone(),
        };
        match window.after(Timestamp::now().to_zoned(TimeZone::UTC).datetime()) {
            Some(_) => Ok(window),
            None => Err(NotAWindow::Never(schedule.clone())),
        }
    }

    /// When the one opened that is open, or else when the next one opens.
    fn last_or_next(&self, now: Timestamp) -> Option<Timestamp> {
        let from = now.checked_sub(self.duration + LEAP).ok()?;
        let mut clock = from.to_zoned(self.zone.clone()).datetime();
        for _ in 0..OPENINGS {
            clock = self.after(clock)?;
            let opens = self.zone.to_ambiguous_zoned(clock).compatible().ok()?.timestamp();
            if now < opens + self.duration {
                return Some(opens);
            }
        }
        None
    }

    /// The next time on the clock. The expression itself knows no zone.
    fn after(&self, clock: DateTime) -> Option<DateTime> {
        let from = Offset::UTC.to_timestamp(clock).ok()?;
        Some(self.opens.find_next(MakeTimestamp(from)).ok()?.datetime())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn window(schedule: &str, duration: &str, zone: &str) -> MaintenanceWindow {
        MaintenanceWindow { schedule: schedule.to_owned(), duration: duration.to_owned(), time_zone: zone.to_owned() }
    }

    fn windows(schedule: &str, duration: &str, zone: &str) -> Windows {
        Windows::read(&[window(schedule, duration, zone)]).unwrap()
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn opens(windows: &Windows, now: &str) -> String {
        match windows.at(at(now)) {
            Moment::Open => "open".to_owned(),
            Moment::Closed { until, .. } => until.unwrap().to_string(),
        }
    }

    #[test]
    fn without_windows_it_is_always_open_and_where_they_cannot_be_read_never() {
        assert_eq!(Windows::read(&[]).unwrap().at(at("2026-11-30T12:00:00Z")), Moment::Open);
        let closed = Windows::Unknown.at(at("2026-11-30T12:00:00Z"));
        assert!(matches!(closed, Moment::Closed { until: None, said } if said.contains("spec.maintenanceWindows")));
    }

    #[test]
    fn a_window_is_open_from_its_minute_for_its_duration_on_the_clock_of_its_zone() {
        let nights = windows("0 22 * * MON-FRI", "4h", "Europe/Berlin");
        for (now, expected) in [
            ("2026-11-30T20:59:59Z", "2026-11-30T21:00:00Z"),
            ("2026-11-30T21:00:00Z", "open"),
            ("2026-12-01T00:59:59Z", "open"),
            ("2026-12-01T01:00:00Z", "2026-12-01T21:00:00Z"),
            ("2026-12-05T01:00:00Z", "2026-12-07T21:00:00Z"),
            ("2026-07-01T19:59:00Z", "2026-07-01T20:00:00Z"),
        ] {
            assert_eq!(opens(&nights, now), expected, "{now}");
        }
        let Moment::Closed { said, .. } = nights.at(at("2026-12-05T01:00:00Z")) else { panic!("it is Saturday") };
        assert!(said.ends_with("opens on 2026-12-07 at 22:00 (Europe/Berlin)"), "{said}");
    }

    #[test]
    fn the_first_of_several_counts() {
        let list = [window("0 3 * * *", "1h", "UTC"), window("0 23 * * *", "1h", "America/New_York")];
        let two = Windows::read(&list).unwrap();
        assert_eq!(opens(&two, "2026-12-01T02:00:00Z"), "2026-12-01T03:00:00Z");
        assert_eq!(opens(&two, "2026-12-01T03:59:00Z"), "open");
        assert_eq!(opens(&two, "2026-12-01T04:30:00Z"), "open", "it is 23:30 in New York");
        assert_eq!(opens(&two, "2026-12-01T05:00:00Z"), "2026-12-02T03:00:00Z");
    }

    #[test]
    fn the_hour_that_a_spring_night_leaves_out_is_the_next_one_and_that_of_autumn_the_first() {
        let nights = windows("30 2 * * *", "1h", "Europe/Berlin");
        assert_eq!(opens(&nights, "2026-03-28T23:00:00Z"), "2026-03-29T01:30:00Z", "03:30 of summer time");
        assert_eq!(opens(&nights, "2026-03-29T02:29:00Z"), "open");
        assert_eq!(opens(&nights, "2026-03-29T02:30:00Z"), "2026-03-30T00:30:00Z");
        assert_eq!(opens(&nights, "2026-10-25T00:00:00Z"), "2026-10-25T00:30:00Z", "02:30 of summer time");
        assert_eq!(opens(&nights, "2026-10-25T01:29:00Z"), "open");
        assert_eq!(opens(&nights, "2026-10-25T01:30:00Z"), "2026-10-26T01:30:00Z", "and not a second time");
        let long = windows("0 22 * * *", "6h", "Europe/Berlin");
        assert_eq!(opens(&long, "2026-03-29T02:59:00Z"), "open", "six hours of that night end at 05:00");
        assert_eq!(opens(&long, "2026-03-29T03:00:00Z"), "2026-03-29T20:00:00Z");
    }

    #[test]
    fn a_month_has_the_days_that_it_has() {
        let last = windows("0 0 31 * *", "1h", "UTC");
        assert_eq!(opens(&last, "2026-11-01T00:00:00Z"), "2026-12-31T00:00:00Z");
        let end = windows("0 0 L * *", "1h", "UTC");
        assert_eq!(opens(&end, "2028-02-01T00:00:00Z"), "2028-02-29T00:00:00Z");
        let leap = windows("0 0 29 2 *", "1h", "UTC");
        assert_eq!(opens(&leap, "2026-11-01T00:00:00Z"), "2028-02-29T00:00:00Z");
        let saturday = windows("0 4 * * SAT#1", "2h", "UTC");
        assert_eq!(opens(&saturday, "2026-11-30T00:00:00Z"), "2026-12-05T04:00:00Z");
    }

    #[test]
    fn what_is_no_window_is_refused_with_what_is_wrong() {
        let refused = |schedule: &str, duration: &str, zone: &str| {
            Windows::read(&[window("0 0 * * *", "1h", "UTC"), window(schedule, duration, zone)]).unwrap_err()
        };
        for schedule in ["", "0 0 * *", "61 0 * * *", "0 0 * * FRO", "@daily", "0 0 * * * UTC"] {
            let error = refused(schedule, "1h", "UTC");
            assert!(matches!(&error, NotAWindow::Schedule { schedule: named, .. } if named == schedule), "{error}");
        }
        assert_eq!(refused("0 0 30 2 *", "1h", "UTC"), NotAWindow::Never("0 0 30 2 *".to_owned()));
        for duration in ["", "1", "4m", "169h", "-1h"] {
            assert_eq!(refused("0 0 * * *", duration, "UTC"), NotAWindow::Duration(duration.to_owned()));
        }
        assert_eq!(refused("0 0 * * *", "1h", "Mars/Phobos"), NotAWindow::TimeZone("Mars/Phobos".to_owned()));
    }

    proptest! {
        /// Whatever is written: at the moment that is named it is open, a moment before it is not.
        #[test]
        fn it_opens_when_it_says_and_not_before(
            minute in 0..60, hour in 0..24, day in 1..29,
            every: bool,
            minutes in 5..10_080_i64,
            zone in prop::sample::select(vec!["UTC", "Europe/Berlin", "America/St_Johns", "Pacific/Apia", "Australia/Lord_Howe"]),
            seconds in 1_700_000_000..1_900_000_000_i64,
        ) {
            let schedule = if every { format!("{minute} {hour} * * *") } else { format!("{minute} {hour} {day} * *") };
            let windows = windows(&schedule, &format!("{minutes}m"), zone);
            let now = Timestamp::from_second(seconds).unwrap();
            if let Moment::Closed { until, .. } = windows.at(now) {
                let until = until.unwrap();
                prop_assert!(until > now);
                prop_assert_eq!(windows.at(until), Moment::Open);
                let before = until - SignedDuration::from_secs(1);
                let closed = windows.at(before);
                prop_assert!(matches!(&closed, Moment::Closed { until: Some(same), .. } if *same == until), "{closed:?}");
            }
        }
    }
}
