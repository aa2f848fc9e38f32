//! Label selectors as people write them on a command line: `app=train,tier!=web,queue in (a,b),!debug`.

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::core::{Expression, Selector};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no label selector such as app=train,tier!=web")]
pub struct NotASelector(String);

/// By which a DaemonSet knows its pods and revisions.
pub fn of_set(set: &DaemonSet) -> String {
    let labels = set.spec.as_ref().and_then(|spec| spec.selector.match_labels.as_ref()).into_iter().flatten();
    labels.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

/// `None` of a text that selects nothing in particular.
pub fn parse(text: &str) -> Result<Option<Selector>, NotASelector> {
    let wrong = || NotASelector(text.to_owned());
    let mut expressions = Vec::new();
    for part in parts(text).ok_or_else(wrong)? {
        expressions.push(expression(part.trim()).ok_or_else(wrong)?);
    }
    Ok((!expressions.is_empty()).then(|| expressions.into_iter().collect()))
}

/// At commas outside of brackets.
fn parts(text: &str) -> Option<Vec<&str>> {
    let (mut parts, mut from, mut depth) = (Vec::new(), 0, 0_u32);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1)?,
            ',' if depth == 0 => {
                parts.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[from..]);
    if text.trim().is_empty() {
        parts.clear();
    }
    (depth == 0).then_some(parts)
}

fn expression(part: &str) -> Option<Expression> {
    if let Some((key, values)) = part.split_once(" notin ") {
        return Some(Expression::NotIn(word(key)?, list(values)?));
    }
    if let Some((key, values)) = part.split_once(" in ") {
        return Some(Expression::In(word(key)?, list(values)?));
    }
    if let Some((key, value)) = part.split_once("!=") {
        return Some(Expression::NotEqual(word(key)?, value_of(value)?));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return Some(Expression::Equal(word(key)?, value_of(value)?));
    }
    match part.strip_prefix('!') {
        Some(key) => Some(Expression::DoesNotExist(word(key)?)),
        None => Some(Expression::Exists(word(part)?)),
    }
}

fn list<T: FromIterator<String>>(values: &str) -> Option<T> {
    let values = values.trim().strip_prefix('(')?.strip_suffix(')')?;
    values.split(',').map(value_of).collect()
}

/// A label's key.
fn word(text: &str) -> Option<String> {
    Some(value_of(text)?).filter(|word| !word.is_empty())
}

/// A label's value, which may be empty.
fn value_of(text: &str) -> Option<String> {
    let text = text.trim();
    text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kube::core::SelectorExt;

    use super::*;

    #[test]
    fn every_form_selects_as_kubectl_does() {
        let pod: BTreeMap<String, String> =
            [("app", "train"), ("tier", "batch")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let selects = |text: &str| parse(text).unwrap().unwrap().matches(&pod);
        for text in
            ["app=train", "app==train,tier!=web", "app in (train, serve)", "tier notin (web)", "tier", "!debug,app"]
        {
            assert!(selects(text), "{text}");
        }
        for text in ["app=serve", "app!=train", "tier in (web,db)", "app notin (train)", "debug", "!app"] {
            assert!(!selects(text), "{text}");
        }
    }

    #[test]
    fn nothing_selects_nothing_and_what_is_no_selector_is_refused_with_its_text() {
        assert_eq!(parse("  "), Ok(None));
        for text in ["app=a b", "=x", "app in a,b", "app in (a", "a,,b", "!"] {
            assert_eq!(parse(text), Err(NotASelector(text.to_owned())));
        }
    }
}
