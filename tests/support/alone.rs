//! One test at a time.

use std::{
    panic::resume_unwind,
    sync::{Mutex, PoisonError},
    thread,
};

/// A ClusterPolicy is large, and unoptimized futures hold several of them.
const STACK: usize = 32 << 20;

static TURN: Mutex<()> = Mutex::new(());

/// Runs a test when no other one of this program runs, on threads with large stacks. `failed` looks at what a test that
/// panics has left, before another one begins.
pub fn alone(test: impl AsyncFnOnce() + Send, failed: impl FnOnce()) {
    let _mine = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let run = || {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).thread_stack_size(STACK).enable_all().build();
        runtime.expect("a runtime should be buildable").block_on(test());
    };
    let ended = thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, run);
        thread.expect("a thread should be startable").join()
    });
    if let Err(panic) = ended {
        failed();
        resume_unwind(panic);
    }
}
