// hide PATH: opens a device and keeps it open where no process is seen to have it: in a message that nobody has received.
// A mapping, or a file that io_uring has, would do the same.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

int main(int argc, char **argv)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))];
	struct iovec data = {.iov_base = &byte, .iov_len = 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	int device, pair[2];

	if (argc != 2) {
		fprintf(stderr, "usage: hide PATH\n");
		return 2;
	}
	if ((device = open(argv[1], O_RDWR)) < 0)
		return fail(argv[1]);
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		return fail("socketpair");
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof device);
	memcpy(CMSG_DATA(header), &device, sizeof device);
	if (sendmsg(pair[0], &message, 0) < 0)
		return fail("sendmsg");
	close(device);
	printf("hidden\n");
	fflush(stdout);
	pause();
	return 0;
}
