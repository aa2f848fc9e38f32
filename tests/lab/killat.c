// killat N COMMAND...: runs a command, and kills it with all its children right before the N-th time that one of them changes
// something: writes to a file, renames one, or loads a module. Exits with 137 then, and with the command's status if there was no
// N-th time. What goes through pipes is not counted, so N means the same each time. A second thread that writes gets an error: to
// follow threads takes long, and the programs that this is for only read in theirs.
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define KILLED 137
#define MOST 1024

static int fail(const char *what)
{
	perror(what);
	return 1;
}

// Only these calls stop the process, so all else runs at its own speed.
static int stop_at_changes(void)
{
	static const int calls[] = {
		SYS_write, SYS_renameat, SYS_renameat2, SYS_finit_module,
#ifdef SYS_rename
		SYS_rename,
#endif
	};
	enum { COUNT = sizeof calls / sizeof *calls };
	struct sock_filter code[COUNT + 3];
	struct sock_fprog program = {.len = COUNT + 3, .filter = code};

	code[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (int i = 0; i < COUNT; i++)
		code[i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], COUNT - i, 0);
	code[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	code[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

// A file of a file system, not a pipe, a socket or a terminal.
static int is_file(pid_t pid, unsigned long long fd)
{
	char link[64], target[PATH_MAX] = "";

	snprintf(link, sizeof link, "/proc/%d/fd/%llu", pid, fd);
	return readlink(link, target, sizeof target - 1) > 0 && target[0] == '/' && strncmp(target, "/dev/", 5);
}

static int changes(pid_t pid)
{
	struct __ptrace_syscall_info info;

	if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info) <= 0)
		return 0;
	return info.seccomp.nr != SYS_write || is_file(pid, info.seccomp.args[0]);
}

// All that are traced are killed, and have ended, before this returns.
static int kill_all(const pid_t *pids, int count)
{
	for (int i = 0; i < count; i++)
		kill(pids[i], SIGKILL);
	while (waitpid(-1, NULL, __WALL) > 0)
		;
	return KILLED;
}

int main(int argc, char **argv)
{
	long options = PTRACE_O_TRACESECCOMP | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_EXITKILL;
	int left, status, result = 0, count = 0;
	static pid_t pids[MOST];
	pid_t first, pid;

	if (argc < 3 || (left = atoi(argv[1])) < 1) {
		fprintf(stderr, "usage: killat N COMMAND...\n");
		return 2;
	}
	first = fork();
	if (first < 0)
		return fail("fork");
	if (!first) {
		ptrace(PTRACE_TRACEME, 0, NULL, NULL);
		raise(SIGSTOP);
		if (stop_at_changes())
			return fail("seccomp");
		execvp(argv[2], argv + 2);
		return fail(argv[2]);
	}
	if (waitpid(first, &status, 0) < 0 || ptrace(PTRACE_SETOPTIONS, first, NULL, options) || ptrace(PTRACE_CONT, first, NULL, NULL))
		return fail("ptrace");
	pids[count++] = first;
	while ((pid = waitpid(-1, &status, __WALL)) > 0) {
		int signal = 0, known = 0;

		if (WIFEXITED(status) || WIFSIGNALED(status)) {
			if (pid == first)
				result = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
			continue;
		}
		for (int i = 0; i < count; i++)
			known |= pids[i] == pid;
		if (!known && count < MOST)
			pids[count++] = pid;
		if (status >> 8 == (SIGTRAP | PTRACE_EVENT_SECCOMP << 8)) {
			if (changes(pid) && !--left)
				return kill_all(pids, count);
		} else if (WSTOPSIG(status) != SIGTRAP && (known || WSTOPSIG(status) != SIGSTOP)) {
			signal = WSTOPSIG(status);
		}
		ptrace(PTRACE_CONT, pid, NULL, signal);
	}
	return result;
}
