//! See [`gpuvirt::cli`].

#[cfg(not(target_os = "linux"))]
compile_error!("gpuvirt is for Linux; elsewhere there is `cargo build --bin kubectl-gpuvirt`");

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    gpuvirt::cli::main()
}
