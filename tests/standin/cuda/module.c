/* Modules, libraries and launches. An image is only looked at; what it gives are the built-in kernels, by name. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

struct module {
  int loaded;
};

static int is_image(const char *image) {
  static const char elf[] = "\177ELF", fat[] = "\x50\xed\x55\xba";
  if (!image) return 0;
  return !memcmp(image, elf, 4) || !memcmp(image, fat, 4) || !strncmp(image, "STANDIN", 7) || strstr(image, ".version");
}

static CUresult load(CUmodule *module, const void *image) {
  if (!is_image(image)) return CUDA_ERROR_INVALID_IMAGE;
  *module = calloc(1, sizeof **module);
  (*module)->loaded = 1;
  return CUDA_SUCCESS;
}

static CUresult unload(CUmodule module) {
  if (!module || !module->loaded) return CUDA_ERROR_INVALID_HANDLE;
  free(module);
  return CUDA_SUCCESS;
}

static CUresult function(CUfunction *found, CUmodule module, const char *name) {
  if (!module || !module->loaded) return CUDA_ERROR_INVALID_HANDLE;
  *found = kernel_named(name);
  return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  ENTER(NEEDS_CONTEXT);
  return load(module, image);
}

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, int *options, void **values) {
  ENTER(NEEDS_CONTEXT);
  (void)count, (void)options, (void)values;
  return load(module, image);
}

API CUresult cuModuleUnload(CUmodule module) {
  ENTER(NEEDS_DRIVER);
  return unload(module);
}

API CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
  ENTER(NEEDS_CONTEXT);
  return function(found, module, name);
}

API CUresult cuLibraryLoadData(CUmodule *library, const void *image, int *options, void **values, unsigned count,
                               int *library_options, void **library_values, unsigned library_count) {
  ENTER(NEEDS_DRIVER);
  (void)options, (void)values, (void)count, (void)library_options, (void)library_values, (void)library_count;
  return load(library, image);
}

API CUresult cuLibraryUnload(CUmodule library) {
  ENTER(NEEDS_DRIVER);
  return unload(library);
}

API CUresult cuLibraryGetKernel(CUfunction *found, CUmodule library, const char *name) {
  ENTER(NEEDS_DRIVER);
  return function(found, library, name);
}

API CUresult cuKernelGetFunction(CUfunction *found, CUfunction kernel) {
  ENTER(NEEDS_CONTEXT);
  *found = kernel;
  return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction kernel) {
  ENTER(NEEDS_DRIVER);
  (void)kernel;
  *value = attribute == 0 ? 1024 : 0; /* the most threads a block */
  return CUDA_SUCCESS;
}

API CUresult cuKernelGetAttribute(int *value, int attribute, CUfunction kernel, CUdevice device) {
  (void)device;
  return cuFuncGetAttribute(value, attribute, kernel);
}

typedef struct {
  CUfunction kernel;
  uint64_t arguments[MAX_PARAMETERS];
} launch;

static void run_launch(void *argument) {
  launch *l = argument;
  l->kernel->run(l->arguments);
}

API CUresult cuLaunchKernel(CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                            void **extra) {
  ENTER(NEEDS_CONTEXT);
  (void)shared;
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z) return CUDA_ERROR_INVALID_VALUE;
  if ((uint64_t)block_x * block_y * block_z > 1024 || extra) return CUDA_ERROR_INVALID_VALUE;
  launch *l = calloc(1, sizeof *l);
  l->kernel = kernel;
  for (int i = 0; i < MAX_PARAMETERS && kernel->bytes[i]; i++) memcpy(&l->arguments[i], arguments[i], kernel->bytes[i]);
  CUresult status = stream_submit(stream, run_launch, free, l);
  if (status) free(l);
  return status;
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction kernel, void **arguments, void **extra) {
  return cuLaunchKernel(kernel, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y, c->block_z, c->shared_bytes,
                        c->stream, arguments, extra);
}
