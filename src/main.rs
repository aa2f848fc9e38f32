//! See [`gpuvirt::cli`].

fn main() -> std::process::ExitCode {
    gpuvirt::cli::main()
}
