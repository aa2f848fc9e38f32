//! Which `NVIDIADriver` a node belongs to.

use std::collections::BTreeMap;

use crds::{labels, v1alpha1::NVIDIADriver};
use kube::ResourceExt;

/// What one `NVIDIADriver` says of the nodes that it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    pub name: String,
    pub selector: BTreeMap<String, String>,
    /// It takes what nobody else selects.
    pub default: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner<'a> {
    Nobody,
    One(&'a str),
    /// Two or more select it, or two are the default: whoever has it keeps it.
    Contested(Vec<&'a str>),
}

impl Claim {
    /// One that is being deleted takes no node.
    pub fn of(driver: &NVIDIADriver) -> Option<Self> {
        let spec = &driver.spec;
        driver.metadata.deletion_timestamp.is_none().then(|| Self {
            name: driver.name_any(),
            selector: spec.node_selector.clone(),
            default: spec.default,
        })
    }

    fn selects(&self, node: &BTreeMap<String, String>) -> bool {
        self.selector.iter().all(|(key, value)| node.get(key) == Some(value))
    }
}

pub fn owner<'a>(node: &BTreeMap<String, String>, claims: &'a [Claim]) -> Owner<'a> {
    let of = |default: bool| -> Vec<&'a str> {
        let claims = claims.iter().filter(|claim| claim.default == default && claim.selects(node));
        claims.map(|claim| claim.name.as_str()).collect()
    };
    let mut all = of(false);
    if all.is_empty() {
        all = of(true);
    }
    match all[..] {
        [] => Owner::Nobody,
        [one] => Owner::One(one),
        _ => Owner::Contested(all),
    }
}

/// Who has the node now: a contested one stays with whom it has been.
pub fn present<'a>(node: &BTreeMap<String, String>, claims: &'a [Claim]) -> Option<&'a str> {
    match owner(node, claims) {
        Owner::Nobody => None,
        Owner::One(name) => Some(name),
        Owner::Contested(all) => {
            let label = node.get(labels::DRIVER_OWNER)?;
            all.into_iter().find(|name| name == label)
        }
    }
}

/// The change of the node's label. `None` in place of claims: it is not known who there is, and the label stays.
pub fn label(node: &BTreeMap<String, String>, claims: Option<&[Claim]>) -> Option<(String, Option<String>)> {
    let wanted = match owner(node, claims?) {
        Owner::Contested(_) => return None,
        Owner::Nobody => None,
        Owner::One(name) => Some(name.to_owned()),
    };
    (node.get(labels::DRIVER_OWNER) != wanted.as_ref()).then(|| (labels::DRIVER_OWNER.to_owned(), wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(name: &str, selector: &[(&str, &str)], default: bool) -> Claim {
        Claim { name: name.to_owned(), selector: node(selector), default }
    }

    fn node(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
        labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn who_selects_a_node_has_it_and_the_default_takes_the_rest() {
        let claims = [claim("rest", &[], true), claim("a", &[("pool", "a")], false)];
        assert_eq!(owner(&node(&[("pool", "a")]), &claims), Owner::One("a"));
        assert_eq!(owner(&node(&[]), &claims), Owner::One("rest"));
        assert_eq!(owner(&node(&[]), &claims[1..]), Owner::Nobody);
    }

    #[test]
    fn a_contested_node_stays_with_whom_it_has_been() {
        let claims = [claim("a", &[("pool", "a")], false), claim("b", &[], false)];
        let contested = node(&[("pool", "a"), (labels::DRIVER_OWNER, "b")]);
        assert_eq!(owner(&contested, &claims), Owner::Contested(vec!["a", "b"]));
        assert_eq!((present(&contested, &claims), label(&contested, Some(&claims))), (Some("b"), None));
        assert_eq!(present(&node(&[("pool", "a")]), &claims), None, "a new one gets no driver");
    }

    #[test]
    fn the_label_follows_and_stays_while_nothing_is_known() {
        let labelled = node(&[(labels::DRIVER_OWNER, "a")]);
        let key = labels::DRIVER_OWNER.to_owned();
        assert_eq!(label(&labelled, None), None);
        assert_eq!(label(&labelled, Some(&[])), Some((key.clone(), None)));
        assert_eq!(label(&node(&[]), Some(&[claim("a", &[], false)])), Some((key, Some("a".to_owned()))));
        assert_eq!(label(&labelled, Some(&[claim("a", &[], false)])), None);
    }
}
