//! Writes docs/reference; `make generate` runs it.

#[path = "../tests/docs/reference.rs"]
mod reference;

fn main() -> std::io::Result<()> {
    for (path, text) in reference::pages() {
        std::fs::write(path, text)?;
    }
    Ok(())
}
