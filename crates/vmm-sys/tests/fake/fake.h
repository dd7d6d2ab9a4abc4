// What the parts of the fake driver share: see fake_cuda.c.
#ifndef FAKE_H
#define FAKE_H
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 13000
#endif
#ifndef FAKE_DEVICES
#define FAKE_DEVICES 2
#endif
#ifndef FAKE_INIT
#define FAKE_INIT 0
#endif
#ifndef FAKE_VERSION_CODE
#define FAKE_VERSION_CODE 0
#endif
#define GRANULARITY 2097152ull


// ---- the types, as cuda.h has them ----
typedef unsigned CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct { unsigned type; int id; } CUmemLocation;
typedef struct {
  unsigned type, requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct {
    unsigned char compressionType, gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; unsigned flags; } CUmemAccessDesc;
typedef struct { char bytes[16]; } CUuuid;

struct CUctx_st { int device, references; };
struct CUstream_st { int device, capturing; unsigned long long id; };
struct CUevent_st { int device, recorded; };
typedef struct { CUmemAllocationProp prop; size_t size; int fd; } Chunk;


// ---- state ----
extern struct CUctx_st contexts[FAKE_DEVICES + 1];
extern __thread CUcontext current;
extern __thread unsigned capture_mode;
extern int pending;                 // what queries answer
extern unsigned char peer_refused;  // no link between any two devices

// A handle is not an ordinal.
static inline int ordinal_of(CUdevice device) { return device - 1000; }

// ---- log ----
unsigned note(const char *name, const char *format, ...);
void *fake_make(size_t bytes);
// Notes a call, and leaves the function if it was told to fail.
#define NOTE(...) NOTE_(__func__, __VA_ARGS__, "")
#define NOTE_(name, format, ...) \
  do { unsigned code_ = note(name, format, __VA_ARGS__); if (code_) return code_; } while (0)
#endif
