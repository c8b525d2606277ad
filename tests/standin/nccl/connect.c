/* Connections and the transport that each would use: made at init or at the first operation, and told in the log. */
#define _GNU_SOURCE
#include "comm.h"

#include <stdlib.h>
#include <string.h>

enum { CHANNELS = 2 };

static const char *transport(ncclComm_t comm, int peer) {
  const char *forced = getenv("STANDIN_TRANSPORT");
  const seat *seats = comm->world->seats;
  if (forced && *forced) return strncmp(forced, "NET", 3) ? forced : "NET";
  return seats[peer].host == seats[comm->rank].host ? "P2P" : "NET";
}

int crosses_network(ncclComm_t comm, int peer) {
  return peer != comm->rank && !strcmp(transport(comm, peer), "NET");
}

static void log_channel(ncclComm_t comm, int channel, int connection, int from, int to) {
  const seat *seats = comm->world->seats;
  int sends = from == comm->rank;
  const char *way = transport(comm, sends ? to : from);
  if (!strcmp(way, "NET"))
    log_info(comm, SUB_INIT | SUB_NET, "Channel %02d/%d : %d[%d] -> %d[%d] [%s] via NET/%s/0", channel, connection,
             from, seats[from].number, to, seats[to].number, sends ? "send" : "receive", comm->network);
  else if (sends && !strcmp(way, "SHM"))
    log_info(comm, SUB_INIT | SUB_SHM, "Channel %02d : %d[%d] -> %d[%d] via %s", channel, from, seats[from].number, to,
             seats[to].number, nccl_version() >= 23005 ? "SHM/direct" : "SHM/direct/direct");
  else if (sends)
    log_info(comm, SUB_INIT | SUB_P2P, "Channel %02d/%d : %d[%d] -> %d[%d] via P2P/CUMEM", channel, connection, from,
             seats[from].number, to, seats[to].number);
}

/* A ring: every rank waits here until all have come. */
ncclResult_t connect_all(ncclComm_t comm) {
  int next = (comm->rank + 1) % comm->size, before = (comm->rank + comm->size - 1) % comm->size;
  if (comm->ring) return ncclSuccess;
  atomic_store(&comm->world->seats[comm->rank].connected, 1);
  world_ring(comm);
  for (int r = 0; r < comm->size; r++) AWAIT(comm, atomic_load(&comm->world->seats[r].connected), ncclInternalError);
  comm->ring = 1;
  if (comm->size == 1) return ncclSuccess;
  for (int c = 0; c < CHANNELS; c++) log_channel(comm, c, 0, before, comm->rank);
  for (int c = 0; c < CHANNELS; c++) log_channel(comm, c, 0, comm->rank, next);
  log_info(comm, SUB_INIT, "Connected all rings%s", nccl_version() >= 22400 ? ", use ring PXN 0 GDR 1" : "");
  return ncclSuccess;
}

/* Point to point: always at the first operation between the two. All of a group are announced before one is awaited. */
void connect_announce(ncclComm_t comm, int peer, int sends) {
  atomic_fetch_or(&comm->world->seats[comm->rank].linked[peer], sends ? 1 : 2);
  world_ring(comm);
}

ncclResult_t connect_await(ncclComm_t comm, int peer, int sends) {
  int done = sends ? 4 : 8;
  if (peer == comm->rank || (comm->links[peer] & done)) return ncclSuccess;
  AWAIT(comm, atomic_load(&comm->world->seats[peer].linked[comm->rank]) & (sends ? 2 : 1), ncclInternalError);
  comm->links[peer] |= done;
  for (int c = 0; c < CHANNELS; c++) log_channel(comm, c, 1, sends ? comm->rank : peer, sends ? peer : comm->rank);
  return ncclSuccess;
}
