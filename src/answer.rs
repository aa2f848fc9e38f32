//! The forms of an answer: for a person, or for a program. What a program reads keeps its shape.

use clap::ValueEnum;
use serde::Serialize;

use crate::terminal::print;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For a person.
    #[default]
    #[value(alias = "table")]
    Text,
    Json,
    Yaml,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the answer has no such form")]
    Json(#[from] serde_json::Error),
    #[error("the answer has no such form")]
    Yaml(#[from] serde_saphyr::SerializeError),
    #[error("the answer cannot be printed")]
    Print(#[from] std::io::Error),
}

impl Output {
    /// To standard output, as [`Self::answer`] has it.
    pub fn print<R: Serialize>(self, report: &R, text: impl FnOnce(&R) -> String) -> Result<(), Error> {
        Ok(print(&self.answer(report, text)?)?)
    }

    /// A report in this form; `text` is the one for a person.
    pub fn answer<R: Serialize>(self, report: &R, text: impl FnOnce(&R) -> String) -> Result<String, Error> {
        match self {
            Self::Text => Ok(text(report)),
            Self::Json => json(report),
            Self::Yaml => yaml(report),
        }
    }
}

pub fn json(report: &impl Serialize) -> Result<String, Error> {
    Ok(serde_json::to_string_pretty(report)? + "\n")
}

pub fn yaml(report: &impl Serialize) -> Result<String, Error> {
    Ok(serde_saphyr::to_string(report)?)
}
