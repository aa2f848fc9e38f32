//! Writes what of the chart is made from its values and their schema; `make generate` runs it.

#[path = "../tests/chart/generate.rs"]
#[allow(dead_code, reason = "the tests of the chart use the rest")]
mod generate;

fn main() -> std::io::Result<()> {
    for (file, text) in generate::files() {
        std::fs::write(generate::path(file), text)?;
    }
    Ok(())
}
