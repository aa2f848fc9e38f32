//! See [`gpuvirt::kubectl`].

fn main() -> std::process::ExitCode {
    gpuvirt::kubectl::main()
}
