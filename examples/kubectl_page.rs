//! Writes the reference in docs/kubectl-gpuvirt.md; `make generate` runs it.

fn main() -> std::io::Result<()> {
    const PAGE: &str = "docs/kubectl-gpuvirt.md";
    let page = std::fs::read_to_string(PAGE)?;
    std::fs::write(PAGE, gpuvirt::kubectl::page(&page))
}
