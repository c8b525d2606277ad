/* What ThreadSanitizer is told: the order that CUDA promises, and nothing else.

   The queues are built of raw futexes in files that are compiled without -fsanitize=thread, so that none of their own
   synchronization counts as an order between two streams. A token stands for one moment: work that is released into it
   happens before what acquires it. */
#pragma once

#ifdef STANDIN_TSAN
extern void __tsan_acquire(void *token);
extern void __tsan_release(void *token);
#define ORDER_RELEASE(token) __tsan_release(token)
#define ORDER_ACQUIRE(token) __tsan_acquire(token)
#else
#define ORDER_RELEASE(token) ((void)(token))
#define ORDER_ACQUIRE(token) ((void)(token))
#endif
