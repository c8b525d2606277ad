/* The door between the two stand-ins: what libnccl.so.2 asks of libcuda.so.1 beside the public driver API.

   The NCCL stand-in opens the library at run time, as the real NCCL does, so the names are looked up in its cuda.c. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef void (*standin_work)(void *argument);
typedef int (*standin_launch)(void *argument, void *stream);
typedef struct mark standin_mark;

/* Enqueues `run` on a stream of a context (a handle of 0 means the legacy stream there). `finish` follows on the same
   thread, also when an earlier error keeps `run` from running. Returns a CUresult; on failure neither is called. */
int standin_enqueue(void *context, void *stream, standin_work run, standin_work finish, void *argument);

/* Makes nodes of a graph of an operation, where the stream is captured: returns whether it is. Each launch of the graph
   calls `launch`, which returns a CUresult; `drop` is called once no graph has it any more. `by_host`: with a node that
   runs on the host. */
int standin_capture(void *context, void *stream, standin_launch launch, standin_work drop, void *argument, int by_host);

/* The end of what a stream holds now; to be given back. NULL for a stream that never held any. */
standin_mark *standin_mark_of(void *context, void *stream);
void standin_mark_drop(standin_mark *mark);

/* Lets later work of a stream wait for a mark. */
void standin_follow(void *context, void *stream, standin_mark *mark);

/* Where a range that the device may touch lies in this process, or NULL if no allocation holds all of it. */
void *standin_shadow(uint64_t pointer, size_t bytes);

/* Ends the device for this process with a status, as a fault in a kernel does. */
void standin_break(int status);

/* The first 16 bytes of a device's UUID and its bus number. */
int standin_identity(int device, unsigned char uuid[16], int *bus);
