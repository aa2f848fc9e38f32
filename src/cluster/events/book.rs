//! Which events were told, and how often. Pure.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;

use super::NAME_LIMIT;

/// So long after its last time an event that comes again is the same one.
const KEPT: Duration = Duration::from_secs(600);
/// Different events on one object at once, and then one more every [`REFILL`]: as much as a person reads.
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(30);

/// What an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    pub namespace: String,
    pub kind: String,
    pub name: String,
    pub uid: String,
}

/// What makes two events the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    pub subject: Subject,
    pub reason: &'static str,
    pub action: &'static str,
    pub note: String,
}

/// What is to be done with one that comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    New {
        name: String,
    },
    /// It is counted, and nobody is about to write the number.
    Again,
    /// It is counted, and its number is about to be written.
    Counted,
    TooMany,
}

#[derive(Debug)]
struct Told {
    name: String,
    count: i32,
    seen: Instant,
    last: Timestamp,
    /// Whether somebody is about to write the number.
    counting: bool,
}

#[derive(Debug)]
struct Purse {
    left: u32,
    filled: Instant,
}

#[derive(Debug, Default)]
pub struct Book {
    told: HashMap<Entry, Told>,
    purses: HashMap<Subject, Purse>,
    /// When what is over was last taken out: not for each event, of which a fleet that changes tells tens of thousands.
    swept: Option<Instant>,
}

impl Book {
    pub fn note(&mut self, entry: &Entry, now: Instant, time: Timestamp) -> What {
        if self.swept.is_none_or(|swept| now >= swept + REFILL) {
            self.told.retain(|_, told| now < told.seen + KEPT);
            self.purses.retain(|_, purse| now < purse.filled + REFILL * BURST);
            self.swept = Some(now);
        }
        if let Some(told) = self.told.get_mut(entry).filter(|told| now < told.seen + KEPT) {
            told.count = told.count.saturating_add(1);
            (told.seen, told.last) = (now, time);
            let counting = std::mem::replace(&mut told.counting, true);
            return if counting { What::Counted } else { What::Again };
        }
        let purse = self.purses.entry(entry.subject.clone()).or_insert(Purse { left: BURST, filled: now });
        if !purse.spend(now) {
            return What::TooMany;
        }
        let object: String = entry.subject.name.chars().take(NAME_LIMIT).collect();
        let name = format!("{}.{:x}", object.trim_end_matches(['.', '-']), time.as_nanosecond());
        let told = Told { name: name.clone(), count: 1, seen: now, last: time, counting: false };
        self.told.insert(entry.clone(), told);
        What::New { name }
    }

    /// The event's name, how often it was and when last; to be written.
    pub fn counted(&mut self, entry: &Entry) -> Option<(String, i32, Timestamp)> {
        let told = self.told.get_mut(entry)?;
        told.counting = false;
        Some((told.name.clone(), told.count, told.last))
    }

    /// It is not there: the next one is new.
    pub fn forget(&mut self, entry: &Entry) {
        self.told.remove(entry);
    }
}

impl Purse {
    fn spend(&mut self, now: Instant) -> bool {
        while self.left < BURST && now >= self.filled + REFILL {
            self.left += 1;
            self.filled += REFILL;
        }
        if self.left == BURST {
            self.filled = now;
        }
        let has = self.left > 0;
        self.left = self.left.saturating_sub(1);
        has
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, note: &str) -> Entry {
        let subject = Subject {
            namespace: "default".to_owned(),
            kind: "GPUNode".to_owned(),
            name: name.to_owned(),
            uid: "u".to_owned(),
        };
        Entry { subject, reason: "GPURefused", action: "ChangeDriver", note: note.to_owned() }
    }

    fn is_new(what: &What) -> bool {
        matches!(what, What::New { .. })
    }

    #[test]
    fn a_thousand_repeats_are_one_event_and_one_number() {
        let (mut book, now, time) = (Book::default(), Instant::now(), Timestamp::now());
        let again = entry("n1", "busy");
        let all: Vec<What> = (0..1000).map(|_| book.note(&again, now, time)).collect();
        assert!(is_new(&all[0]) && all[1] == What::Again && all[2..].iter().all(|what| *what == What::Counted));
        assert_eq!(book.counted(&again).map(|(_, count, _)| count), Some(1000));
        assert_eq!(book.note(&again, now, time), What::Again, "the next number is to be written, too");
    }

    #[test]
    fn another_note_is_another_event_and_so_is_one_after_a_long_time() {
        let (mut book, now, time) = (Book::default(), Instant::now(), Timestamp::now());
        assert!(is_new(&book.note(&entry("n1", "GPU a"), now, time)));
        assert!(is_new(&book.note(&entry("n1", "GPU b"), now, time)));
        assert!(is_new(&book.note(&entry("n1", "GPU a"), now + KEPT, time)));
        book.forget(&entry("n1", "GPU a"));
        assert!(is_new(&book.note(&entry("n1", "GPU a"), now + KEPT, time)), "it was not written");
    }

    #[test]
    fn what_changes_its_note_each_time_is_kept_from_flooding_and_other_objects_do_not_pay_for_it() {
        let (mut book, now, time) = (Book::default(), Instant::now(), Timestamp::now());
        let mut flood = |at: Instant, number: u32| book.note(&entry("n1", &format!("try {number}")), at, time);
        let written = (0..1000).filter(|number| is_new(&flood(now, *number))).count();
        assert_eq!(written, BURST as usize);
        let later = now + REFILL * 3;
        let written = (1000..2000).filter(|number| is_new(&flood(later, *number))).count();
        assert_eq!(written, 3, "one more every {REFILL:?}");
        assert!(is_new(&book.note(&entry("n2", "try"), later, time)));
    }

    #[test]
    fn what_is_told_long_ago_takes_no_room() {
        let (mut book, now, time) = (Book::default(), Instant::now(), Timestamp::now());
        for number in 0..500 {
            book.note(&entry(&format!("n{number}"), "x"), now, time);
        }
        book.note(&entry("n", "x"), now + REFILL * BURST, time);
        assert_eq!((book.told.len(), book.purses.len()), (1, 1));
    }

    #[test]
    fn an_events_name_is_a_name_however_long_its_objects_is() {
        let (mut book, now, time) = (Book::default(), Instant::now(), Timestamp::now());
        match book.note(&entry(&"long.".repeat(50), "x"), now, time) {
            What::New { name } => assert!(name.len() < 253 && !name.contains(".."), "{name}"),
            what @ (What::Again | What::Counted | What::TooMany) => panic!("{what:?}"),
        }
    }
}
