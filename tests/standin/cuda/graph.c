/* Graphs that a capture left: what they hold, and how an instance of one is launched again and again. Only work of NCCL
   can be run again; other captured work is counted. */
#include "driver.h"

#include <stdatomic.h>

/* The host waits in a launch where so many of an instance are pending, as the driver does. */
enum { EXEC_MAGIC = 0x45584543, MOST_PENDING = 26 };

struct body { /* of a graph and its instances */
  int refs;
  struct node *first;
};

struct graph {
  struct body *body;
};

struct graph_exec {
  int magic, refs, pending;
  struct body *body;
};

void node_add(struct node **first, struct node what) {
  while (*first) first = &(*first)->next;
  *first = cell_new();
  **first = what;
}

/* What the host does for a network; here nothing. */
int standin_host_node(void *argument, void *stream) {
  (void)argument;
  (void)stream;
  return CUDA_SUCCESS;
}

void nodes_drop(struct node *first) {
  for (struct node *next; first; first = next) {
    next = first->next;
    if (first->drop) first->drop(first->argument);
    cell_free(first);
  }
}

CUgraph graph_new(struct node *first) {
  CUgraph graph = cell_new();
  graph->body = cell_new();
  graph->body->refs = 1;
  graph->body->first = first;
  return graph;
}

static void body_drop(struct body *body) {
  if (--body->refs) return;
  nodes_drop(body->first);
  cell_free(body);
}

static void exec_drop(CUgraphExec exec) {
  if (--exec->refs == 0) cell_free(exec);
}

static int valid(CUgraphExec exec) { return exec && exec->magic == EXEC_MAGIC; }

API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  ENTER(NEEDS_DRIVER);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  size_t found = 0;
  driver_lock();
  for (struct node *n = graph->body->first; n && (!nodes || found < *count); n = n->next, found++)
    if (nodes) nodes[found] = n;
  *count = found;
  driver_unlock();
  return CUDA_SUCCESS;
}

API CUresult cuGraphNodeGetType(CUgraphNode node, int *type) {
  ENTER(NEEDS_DRIVER);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  *type = node->type;
  return CUDA_SUCCESS;
}

API CUresult cuGraphDestroy(CUgraph graph) {
  ENTER(NEEDS_DRIVER);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  body_drop(graph->body);
  cell_free(graph);
  driver_unlock();
  return CUDA_SUCCESS;
}

static int can_run(const struct body *body) {
  for (struct node *n = body->first; n; n = n->next)
    if (!n->launch && n->type != NODE_WAIT_EVENT && n->type != NODE_EVENT_RECORD) return 0;
  return 1;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  ENTER(NEEDS_CONTEXT);
  if (!graph || flags) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  CUresult status = can_run(graph->body) ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
  if (!status) {
    *exec = cell_new();
    (*exec)->magic = EXEC_MAGIC;
    (*exec)->refs = 1;
    (*exec)->body = graph->body;
    graph->body->refs++;
  }
  driver_unlock();
  return status;
}

API CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) {
  (void)stream;
  ENTER(NEEDS_CONTEXT);
  return valid(exec) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* One that is in flight goes on. */
API CUresult cuGraphExecDestroy(CUgraphExec exec) {
  ENTER(NEEDS_DRIVER);
  driver_lock();
  int found = valid(exec);
  if (found) {
    exec->magic = 0;
    body_drop(exec->body);
    exec_drop(exec);
  }
  driver_unlock();
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static void launched(void *argument) {
  CUgraphExec exec = argument;
  driver_lock();
  exec->pending--;
  exec_drop(exec);
  driver_ring();
  driver_unlock();
}

static CUresult begin(CUgraphExec exec, CUstream handle) {
  CUstream stream = stream_find(context_current(), handle);
  if (!stream || !valid(exec)) return CUDA_ERROR_INVALID_HANDLE;
  CUresult status = capture_implicit(context_current(), stream);
  if (!status && stream->capture) status = CUDA_ERROR_NOT_SUPPORTED;
  if (status) return status;
  exec->refs++;
  exec->body->refs++; /* until it is launched, whoever destroys it meanwhile */
  while (exec->pending >= MOST_PENDING && !atomic_load(&driver_broken)) driver_wait();
  exec->pending++;
  return CUDA_SUCCESS;
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle) {
  ENTER(NEEDS_CONTEXT);
  driver_lock();
  struct body *body = valid(exec) ? exec->body : NULL;
  CUresult status = begin(exec, handle);
  driver_unlock();
  if (status) return status;
  for (struct node *n = body->first; n && !status; n = n->next)
    if (n->launch) status = n->launch(n->argument, handle);
  driver_lock();
  body_drop(body);
  driver_unlock();
  if (!status) status = stream_submit(handle, NULL, launched, exec);
  if (status) launched(exec);
  return status;
}
