//! What registrations tell of the kubelet. Pure.

use std::collections::BTreeMap;

use super::device_plugin::{ResourceName, States};

/// What a change of the plugins' states means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    Nothing,
    /// A resource was registered for the first time since it was offered.
    Registered,
    /// One was registered again that had been before: there is another kubelet, or there may be.
    Again,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Never,
    Registered,
    Lost,
}

#[derive(Debug, Default)]
pub struct Registrations(BTreeMap<ResourceName, Seen>);

impl Registrations {
    pub fn follow(&mut self, states: &States) -> News {
        self.0.retain(|resource, _| states.contains_key(resource));
        let mut news = News::Nothing;
        for (resource, state) in states {
            let seen = self.0.entry(resource.clone()).or_insert(Seen::Never);
            let (now, told) = match (*seen, state.registered) {
                (Seen::Never, false) => (Seen::Never, News::Nothing),
                (Seen::Never, true) => (Seen::Registered, News::Registered),
                (Seen::Registered, true) => (Seen::Registered, News::Nothing),
                (Seen::Registered | Seen::Lost, false) => (Seen::Lost, News::Nothing),
                (Seen::Lost, true) => (Seen::Registered, News::Again),
            };
            *seen = now;
            if news != News::Again && told != News::Nothing {
                news = told;
            }
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::{super::device_plugin::PluginState, *};

    fn states(registered: &[(&str, bool)]) -> States {
        let state = |registered| PluginState { devices: 1, healthy: 1, registered, message: String::new() };
        registered.iter().map(|(name, is)| (name.parse().expect("a name"), state(*is))).collect()
    }

    #[test]
    fn another_kubelet_is_noticed_by_what_is_registered_again() {
        let mut seen = Registrations::default();
        let (a, b) = ("nvidia.com/A", "nvidia.com/B");
        assert_eq!(seen.follow(&states(&[(a, false), (b, true)])), News::Registered);
        assert_eq!(seen.follow(&states(&[(a, true), (b, false)])), News::Registered);
        assert_eq!(seen.follow(&states(&[(a, true), (b, true)])), News::Again);
        assert_eq!(seen.follow(&states(&[(a, true), (b, true)])), News::Nothing);
    }

    #[test]
    fn a_resource_that_was_withdrawn_and_is_offered_again_is_no_sign_of_another_kubelet() {
        let mut seen = Registrations::default();
        seen.follow(&states(&[("nvidia.com/A", true)]));
        assert_eq!(seen.follow(&States::new()), News::Nothing);
        assert_eq!(seen.follow(&states(&[("nvidia.com/A", true)])), News::Registered);
    }
}
