//! The contract as users and API servers see it: files, schemas, and what decodes.

#![allow(clippy::unwrap_used, reason = "a test ends where a value is missing")]

mod decode;
mod fields;
mod files;
mod own;
mod structural;
