/* A fake libnvidia-ml.so.1: two cards, enough symbols for one reading. FAKE_NVML says how it behaves:
 * ok | not-supported | driver-not-loaded | hang | hang-init | crash | lost (the second card). -DMISSING leaves symbols out. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int index; } card;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } pci;
typedef struct { unsigned gpu, memory; } rates;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory2;
typedef struct { unsigned long long total, free, used; } memory1;
typedef struct { uint32_t id, scope; int64_t at, latency; uint32_t type, ret; union { double d; unsigned u; unsigned long long ull; } v; } field;

static card cards[2] = {{0}, {1}};
static int mode(const char *m) { const char *e = getenv("FAKE_NVML"); return e && !strcmp(e, m); }
static int ok(void) { return mode("not-supported") ? 3 : 0; }

int nvmlInitWithFlags(unsigned f) { if (mode("hang-init")) for (;;) pause(); printf("noise on stdout\n"); fflush(stdout); return mode("driver-not-loaded") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int r) { return "fake error"; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "580.65.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, card **c) { *c = &cards[i]; return mode("lost") && i == 1 ? 15 : 0; }
int nvmlDeviceGetUUID(card *c, char *s, unsigned n) { snprintf(s, n, "GPU-fake-%d", c->index); return 0; }
int nvmlDeviceGetName(card *c, char *s, unsigned n) { snprintf(s, n, "NVIDIA H200"); return 0; }
int nvmlDeviceGetPciInfo_v3(card *c, pci *p) { snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", 0x83 + c->index); return 0; }
int nvmlDeviceGetMigMode(card *c, unsigned *now, unsigned *next) { *now = *next = 0; return ok(); }
int nvmlDeviceGetUtilizationRates(card *c, rates *r) { r->gpu = 87; r->memory = 42; return ok(); }
int nvmlDeviceGetMemoryInfo_v2(card *c, memory2 *m) {
  m->total = 150754820096ULL; m->reserved = 643825664; m->used = 1073741824; m->free = m->total - m->reserved - m->used;
  return m->version == 0x02000028 ? ok() : 25;
}
int nvmlDeviceGetMemoryInfo(card *c, memory1 *m) { m->total = 16ULL << 30; m->used = 1ULL << 30; m->free = 15ULL << 30; return 0; }
int nvmlDeviceGetPowerUsage(card *c, unsigned *mw) { if (mode("hang")) for (;;) pause(); if (mode("crash")) abort(); *mw = 412345; return ok(); }
int nvmlDeviceGetEnforcedPowerLimit(card *c, unsigned *mw) { *mw = 700000; return ok(); }
#ifndef MISSING
int nvmlDeviceGetTotalEnergyConsumption(card *c, unsigned long long *mj) { *mj = 987654321ULL; return ok(); }
int nvmlDeviceGetRemappedRows(card *c, unsigned *a, unsigned *b, unsigned *p, unsigned *f) { *a = 1; *b = 2; *p = *f = 0; return ok(); }
#endif
int nvmlDeviceGetTemperature(card *c, unsigned sensor, unsigned *t) { *t = 61; return ok(); }
int nvmlDeviceGetClockInfo(card *c, unsigned type, unsigned *mhz) { *mhz = type == 1 ? 1980 : 3201; return ok(); }
int nvmlDeviceGetTotalEccErrors(card *c, unsigned type, unsigned counter, unsigned long long *n) { *n = type == 0 ? 5 : ~0ULL; return ok(); }
int nvmlDeviceGetFieldValues(card *c, int n, field *f) {
  for (int i = 0; i < n; i++) {
    f[i].ret = ok(); f[i].type = f[i].id == 82 ? 1 : 3;
    if (f[i].id == 82) f[i].v.u = 70; else f[i].v.ull = 1000000000ULL * f[i].id; /* nanoseconds */
  }
  return 0;
}
