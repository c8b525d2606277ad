/* One lock, one bell and a store of small cells, on raw futexes and mappings: invisible to ThreadSanitizer. */
#define _GNU_SOURCE
#include "driver.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { FREE, HELD, CONTENDED };

static _Atomic int lock_word;
static _Atomic int bell;

static void futex(_Atomic int *word, int operation, int value) {
  syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

void driver_lock(void) {
  int expected = FREE;
  if (atomic_compare_exchange_strong(&lock_word, &expected, HELD)) return;
  while (atomic_exchange(&lock_word, CONTENDED) != FREE) futex(&lock_word, FUTEX_WAIT, CONTENDED);
}

void driver_unlock(void) {
  if (atomic_exchange(&lock_word, FREE) == CONTENDED) futex(&lock_word, FUTEX_WAKE, 1);
}

void driver_wait(void) {
  int heard = atomic_load(&bell);
  driver_unlock();
  futex(&bell, FUTEX_WAIT, heard);
  driver_lock();
}

void driver_ring(void) {
  atomic_fetch_add(&bell, 1);
  futex(&bell, FUTEX_WAKE, INT_MAX);
}

double driver_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* The system call itself: ThreadSanitizer's own mmap would give the cells a history. */
static void *map(size_t bytes, int protection) {
  long place = syscall(SYS_mmap, 0L, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);
  return place == -1 ? NULL : (void *)place;
}

typedef union cell {
  union cell *next;
  char bytes[CELL];
} cell;

static cell *free_cells;

void *cell_new(void) {
  enum { SLAB = 1 << 18 };
  if (!free_cells) {
    cell *slab = map(SLAB, PROT_READ | PROT_WRITE);
    if (!slab) __builtin_trap();
    for (size_t i = 0; i < SLAB / sizeof(cell); i++) {
      slab[i].next = free_cells;
      free_cells = &slab[i];
    }
  }
  cell *taken = free_cells;
  free_cells = taken->next;
  /* Volatile, or the compiler calls memset, which ThreadSanitizer watches. */
  for (size_t i = 0; i < CELL / sizeof(uint64_t); i++) ((volatile uint64_t *)taken)[i] = 0;
  return taken;
}

void cell_free(void *freed) {
  cell *c = freed;
  c->next = free_cells;
  free_cells = c;
}

/* A token that was used twice would join two moments that have nothing to do with each other. */
void *order_token(void) {
#ifdef STANDIN_TSAN
  static const size_t reserved = 1ul << 34;
  static char *base;
  static size_t used;
  if (!base && !(base = map(reserved, PROT_NONE))) __builtin_trap();
  used += 8;
  if (used > reserved) __builtin_trap();
  return base + used - 8;
#else
  return NULL;
#endif
}
