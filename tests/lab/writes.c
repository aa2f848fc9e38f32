// writes FILE...: prints the name of each file when somebody has written to it, or has opened it to do so, until it is killed.
// For files of sysfs, which the kernel itself changes without a write. Says "watching N" once it is ready.
#include <stdio.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	char buffer[4096] __attribute__((aligned(__alignof__(struct inotify_event))));
	int fd = inotify_init1(0), highest = 0;
	char **names;
	ssize_t got;

	// Watch descriptors count from 1; two names of one file share one.
	names = calloc(argc + 1, sizeof *names);
	if (fd < 0 || !names) {
		perror("inotify");
		return 1;
	}
	for (int i = 1; i < argc; i++) {
		int watch = inotify_add_watch(fd, argv[i], IN_MODIFY | IN_CLOSE_WRITE);
		if (watch < 0 || watch > argc) {
			perror(argv[i]);
			return 1;
		}
		names[watch] = argv[i];
		if (watch > highest)
			highest = watch;
	}
	printf("watching %d\n", highest);
	fflush(stdout);
	while ((got = read(fd, buffer, sizeof buffer)) > 0) {
		for (char *at = buffer; at < buffer + got;) {
			struct inotify_event *event = (struct inotify_event *)at;
			if (event->mask & IN_Q_OVERFLOW)
				puts("overflow");
			else if (event->mask & (IN_MODIFY | IN_CLOSE_WRITE))
				puts(names[event->wd]);
			at += sizeof *event + event->len;
		}
		fflush(stdout);
	}
	perror("read");
	return 1;
}
