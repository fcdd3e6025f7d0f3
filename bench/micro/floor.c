/* The least a server can be: one thread, epoll, one read and one write for each request, and always
 * the same answer. Bodies of up to 64 KiB that arrive whole. Usage: floor --port N */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define BODY                                                                                      \
    "{\"worker_id\":1,\"dp_rank\":0,\"effective_prefill_tokens\":512,\"model_name\":\"bench\","   \
    "\"tenant_id\":\"default\",\"endpoint\":\"http://worker-1.invalid:8000\",\"block_size\":16}"

static const char answer[] =
    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 159\r\n\r\n" BODY;
_Static_assert(sizeof BODY == 160, "content-length");

int main(int argc, char **argv) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), poller = epoll_create1(0), yes = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[argc - 1]))};
    struct epoll_event events[64], one = {.events = EPOLLIN, .data.fd = listener};
    static char request[65536];
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 64)) return 1;
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &one);
    for (;;) {
        int count = epoll_wait(poller, events, 64, -1);
        for (int i = 0; i < count; i++) {
            int from = events[i].data.fd;
            if (from == listener) {
                one.data.fd = accept(listener, NULL, NULL);
                setsockopt(one.data.fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
                epoll_ctl(poller, EPOLL_CTL_ADD, one.data.fd, &one);
            } else if (read(from, request, sizeof request) <= 0) {
                close(from);
            } else if (write(from, answer, sizeof answer - 1) < 0) {
                close(from);
            }
        }
    }
}
