//! The name that somebody meant. Pure.

/// The candidate that differs least, if it differs little: first by letters and digits alone, then by single edits.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let meant = letters(name);
    let near = |candidate: &&str| distance(&meant, &letters(candidate));
    let (best, distance) = candidates.into_iter().map(|c| (c, near(&c))).min_by_key(|(c, distance)| (*distance, *c))?;
    (distance <= meant.chars().count() / 5).then_some(best)
}

/// Case, `_`, `-` and `.` are what people get wrong: NVIDIA's own examples spell `nvidia.com/TU104GL_Tesla_T4`.
fn letters(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_uppercase()).collect()
}

/// Levenshtein's.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 3] =
        ["nvidia.com/GA102GL_A10", "nvidia.com/TU104GL_QUADRO_RTX_4000", "nvidia.com/TU104GL_TESLA_T4"];

    #[test]
    fn case_and_punctuation_do_not_matter() {
        assert_eq!(nearest("nvidia.com/TU104GL_Tesla_T4", NAMES), Some(NAMES[2]));
        assert_eq!(nearest("nvidia.com/TU104GL-TESLA-T4", NAMES), Some(NAMES[2]));
        assert_eq!(nearest("nvidia.com/[GA102GL A10]---", NAMES), Some(NAMES[0]));
    }

    #[test]
    fn a_letter_too_few_is_forgiven() {
        assert_eq!(nearest("nvidia.com/TU104_TESLA_T4", NAMES), Some(NAMES[2]));
        assert_eq!(nearest("nvidia.com/GA102GL_A1", NAMES), Some(NAMES[0]));
    }

    #[test]
    fn another_name_is_no_spelling() {
        assert_eq!(nearest("intel.com/x710", NAMES), None);
        assert_eq!(nearest("nvidia.com/GH100_H100_SXM5_80GB", NAMES), None);
        assert_eq!(nearest("nvidia.com/TU104GL_TESLA_T4", []), None);
    }
}
