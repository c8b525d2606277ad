/* Where ranks meet: one anonymous file in memory, its bell, and who is still alive. */
#define _GNU_SOURCE
#include "comm.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A unique ID has the form of the real one: random bytes, a socket's address, zeros. Behind the address are the process
   and the file descriptor that made it. */
typedef struct {
  unsigned char key[8];
  struct sockaddr_in address;
  int process, file;
} identity;

enum { MADE = 64, NAP_MS = 2, LIFE_CHECK_MS = 10 };
static struct { unsigned char key[8]; int file; } made[MADE];
static _Atomic unsigned made_count;

static long now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* A communicator that is being made from another one stops with it. */
static int is_stopped(ncclComm_t comm) {
  return atomic_load(&comm->stop) || (comm->parent && atomic_load(&comm->parent->stop));
}

static world *map(int file) {
  world *w = mmap(NULL, sizeof(world), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return w == MAP_FAILED ? NULL : w;
}

ncclResult_t world_make(ncclUniqueId *id) {
  identity who = {.process = getpid()};
  memset(id, 0, sizeof *id);
  if (getrandom(who.key, sizeof who.key, 0) != sizeof who.key) return ncclSystemError;
  for (size_t i = 0; i < sizeof who.key; i++) who.key[i] |= 1;
  who.address.sin_family = AF_INET;
  memcpy(&who.address.sin_port, who.key, 2);
  who.address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  who.file = memfd_create("standin-nccl", MFD_CLOEXEC);
  world *w = who.file >= 0 && !ftruncate(who.file, sizeof(world)) ? map(who.file) : NULL;
  if (!w) return ncclSystemError;
  memcpy(w->key, who.key, sizeof who.key);
  munmap(w, sizeof *w);
  unsigned slot = atomic_fetch_add(&made_count, 1) % MADE;
  memcpy(made[slot].key, who.key, sizeof who.key);
  made[slot].file = who.file;
  memcpy(id, &who, sizeof who);
  return ncclSuccess;
}

void world_forget_made(ncclComm_t comm) {
  for (int i = 0; i < MADE; i++)
    if (made[i].file && !memcmp(made[i].key, comm->id.bytes, sizeof made[i].key)) {
      close(made[i].file);
      made[i].file = 0;
    }
}

static int try_open(ncclComm_t comm, const identity *who) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", who->process, who->file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  world *w = file >= 0 ? map(file) : NULL;
  if (w && !memcmp(w->key, who->key, sizeof w->key)) {
    comm->world = w;
    comm->file = file;
    return 1;
  }
  if (w) munmap(w, sizeof *w);
  if (file >= 0) close(file);
  return 0;
}

/* Connecting is the one thing that NCCL bounds: 20 s, or 59.5 s from 2.24. */
ncclResult_t world_open(ncclComm_t comm) {
  identity who;
  memcpy(&who, comm->id.bytes, sizeof who);
  long limit = now_ms() + setting("STANDIN_CONNECT_MS", nccl_version() >= 22400 ? 59500 : 20000);
  while (!try_open(comm, &who)) {
    struct timespec nap = {0, 10000000};
    if (is_stopped(comm)) return ncclInternalError;
    if (now_ms() > limit) {
      log_warn("socketPollConnect: connect to 127.0.0.1<%d> returned Connection refused, exceeded error retry count",
               ntohs(who.address.sin_port));
      return ncclRemoteError;
    }
    nanosleep(&nap, NULL);
  }
  return ncclSuccess;
}

void world_close(ncclComm_t comm) {
  if (!comm->world) return;
  munmap(comm->world, sizeof *comm->world);
  close(comm->file);
  comm->world = NULL;
}

/* ---- who is alive: a lock on a byte of the file, which the system gives back when a process ends */

static struct flock seat_lock(int rank) {
  return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

void world_sit(ncclComm_t comm) {
  struct flock lock = seat_lock(comm->rank);
  fcntl(comm->file, F_OFD_SETLK, &lock);
}

static int is_alive(ncclComm_t comm, int rank) {
  struct flock lock = seat_lock(rank);
  return rank == comm->rank || fcntl(comm->file, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

/* A network connection tells of a lost peer; memory between processes of a host does not. 2.18 never tells. */
static unsigned lost_among(ncclComm_t comm, unsigned peers) {
  static _Thread_local long next;
  unsigned lost = 0;
  if (!peers || now_ms() < next || nccl_version() < 21900) return 0;
  next = now_ms() + LIFE_CHECK_MS;
  for (int r = 0; r < comm->size; r++)
    if ((peers >> r & 1) && crosses_network(comm, r) && !is_alive(comm, r)) lost |= 1u << r;
  return lost;
}

/* A peer may do its part, and end well, between a look at its part and a look at its life. So one that is gone is only
   suspected, and reported if its part is still missing at the next look. */
static void report_lost(ncclComm_t comm, unsigned peers) {
  int expected = ncclSuccess;
  if (!(comm->suspects & peers)) return;
  if (atomic_compare_exchange_strong(&comm->state, &expected, ncclRemoteError))
    log_warn("socketProgress: Connection closed by remote peer %d", __builtin_ctz(comm->suspects & peers));
}

/* ---- waiting */

int world_heard(ncclComm_t comm) { return atomic_load(&comm->world->bell); }

void world_ring(ncclComm_t comm) {
  atomic_fetch_add(&comm->world->bell, 1);
  syscall(SYS_futex, &comm->world->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

int world_pause(ncclComm_t comm, int heard, unsigned peers) {
  struct timespec nap = {0, NAP_MS * 1000000};
  if (is_stopped(comm)) return 0;
  report_lost(comm, peers);
  syscall(SYS_futex, &comm->world->bell, FUTEX_WAIT, heard, &nap, NULL, 0);
  comm->suspects |= lost_among(comm, peers);
  return !is_stopped(comm);
}

void world_hang(ncclComm_t comm) {
  struct timespec nap = {0, NAP_MS * 1000000};
  while (!is_stopped(comm)) nanosleep(&nap, NULL);
}
