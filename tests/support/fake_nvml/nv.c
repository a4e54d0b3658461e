/* A fake libnvidia-ml.so.1: two cards, enough symbols for one reading. FAKE_NVML says how it behaves, or is the path of a file that does:
 * ok | not-supported | driver-not-loaded | hang | hang-init | crash | lost (the second card, with an XID 79) | xids (of the first card) |
 * stall (four seconds at the first reading, with an XID 31) | held (by heat) | mig (the first card: GPU instance 2 with two compute instances, and 9) | mig-old (no activity). -DMISSING leaves symbols out. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int index, instance; } card;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } pci;
typedef struct { unsigned gpu, memory; } rates;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory2;
typedef struct { unsigned long long total, free, used; } memory1;
typedef struct { uint32_t id, scope; int64_t at, latency; uint32_t type, ret; union { double d; unsigned u; unsigned long long ull; } v; } field;

typedef struct { card *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event;
typedef struct { unsigned id; int ret; double value; const char *short_name, *long_name, *unit; } metric;
typedef struct { unsigned version, n; int *before, *now; metric metrics[100]; } metrics;
typedef struct { unsigned version, supported; } support;

static card cards[2] = {{0}, {1}}, parts[3] = {{0, 2}, {0, 2}, {0, 9}};
static int mode(const char *m) {
  static char text[32];
  const char *e = getenv("FAKE_NVML");
  if (e && *e == '/') {
    FILE *f = fopen(e, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[n] = 0; e = text;
    if (f) fclose(f);
  }
  return e && !strcmp(e, m);
}
static int divided(void) { return mode("mig") || mode("mig-old"); }
static int ok(void) { return mode("not-supported") ? 3 : 0; }

int nvmlInitWithFlags(unsigned f) { if (mode("hang-init")) for (;;) pause(); printf("noise on stdout\n"); fflush(stdout); return mode("driver-not-loaded") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int r) { return "fake error"; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "580.65.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, card **c) { *c = &cards[i]; return mode("lost") && i == 1 ? 15 : 0; }
int nvmlDeviceGetUUID(card *c, char *s, unsigned n) { snprintf(s, n, c->instance ? "MIG-fake-%d" : "GPU-fake-%d", c->instance ? (int)(c - parts) : c->index); return 0; }
int nvmlDeviceGetName(card *c, char *s, unsigned n) { snprintf(s, n, c->instance == 2 ? "NVIDIA H200 MIG 1c.3g.71gb" : c->instance ? "NVIDIA H200 MIG 1g.18gb" : "NVIDIA H200"); return 0; }
int nvmlDeviceGetPciInfo_v3(card *c, pci *p) { snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", 0x83 + c->index); return 0; }
int nvmlDeviceGetMigMode(card *c, unsigned *now, unsigned *next) { *now = *next = divided() && !c->index; return ok(); }
int nvmlDeviceGetMaxMigDeviceCount(card *c, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(card *c, unsigned i, card **part) { *part = &parts[i]; return i < 3 ? 0 : 6; }
int nvmlDeviceGetGpuInstanceId(card *c, unsigned *id) { *id = c->instance; return 0; }
int nvmlDeviceGetUtilizationRates(card *c, rates *r) { r->gpu = 87; r->memory = 42; return divided() && !c->index ? 3 : ok(); }
int nvmlDeviceGetMemoryInfo_v2(card *c, memory2 *m) {
  m->total = c->instance ? c->instance * (1ULL << 30) + 643825664 : 150754820096ULL; m->reserved = 643825664; m->used = 1073741824; m->free = m->total - m->reserved - m->used;
  return m->version == 0x02000028 ? ok() : 25;
}
int nvmlDeviceGetMemoryInfo(card *c, memory1 *m) { m->total = 16ULL << 30; m->used = 1ULL << 30; m->free = 15ULL << 30; return 0; }
int nvmlDeviceGetPowerUsage(card *c, unsigned *mw) { static int stalled; if (mode("stall") && !stalled++) sleep(4); if (mode("hang")) for (;;) pause(); if (mode("crash")) abort(); *mw = 412345; return ok(); }
int nvmlDeviceGetEnforcedPowerLimit(card *c, unsigned *mw) { *mw = 700000; return ok(); }
#ifndef MISSING
int nvmlDeviceGetTotalEnergyConsumption(card *c, unsigned long long *mj) { *mj = 987654321ULL; return ok(); }
int nvmlDeviceGetRemappedRows(card *c, unsigned *a, unsigned *b, unsigned *p, unsigned *f) { *a = 1; *b = 2; *p = *f = 0; return ok(); }
int nvmlDeviceGetCurrentClocksEventReasons(card *c, unsigned long long *bits) { *bits = mode("held") ? 0x4c : 0x4; return ok(); }
int nvmlEventSetCreate(int **set) { static int one; *set = &one; return 0; }
int nvmlEventSetFree(int *set) { return 0; }
int nvmlDeviceRegisterEvents(card *c, unsigned long long types, int *set) { return types == 8 ? ok() : 2; }
int nvmlEventSetWait_v2(int *set, event *e, unsigned ms) {
  static int told;
  if (ms || !(mode("lost") || mode("xids") || mode("stall")) || told == (mode("xids") ? 3 : 1)) return 10; /* timeout */
  memset(e, 0, sizeof *e);
  e->device = &cards[mode("lost")]; e->type = 8; e->data = mode("lost") ? 79 : told < 2 ? 31 : 999;
  told++;
  return 0;
}
int nvmlGpmQueryDeviceSupport(card *c, support *s) { s->supported = !mode("mig-old"); return 0; }
int nvmlGpmSampleAlloc(int **sample) { *sample = malloc(sizeof **sample); return 0; }
int nvmlGpmSampleFree(int *sample) { free(sample); return 0; }
int nvmlGpmMigSampleGet(card *c, unsigned instance, int *sample) { static int at; *sample = at++ * 100 + instance; return c->instance ? 2 : 0; }
int nvmlGpmMetricsGet(metrics *m) { /* nothing of memory (10); a full 100 percent and some rounding of what ran (1) */
  if (m->version != 1 || *m->now <= *m->before || *m->now % 100 != *m->before % 100) return 2;
  for (unsigned i = 0; i < m->n; i++) {
    unsigned id = m->metrics[i].id;
    m->metrics[i].ret = id == 10 ? 3 : 0;
    m->metrics[i].value = id == 1 ? 100.0000001 : id == 3 ? 0.0 / 0.0 : 10.0 * id + *m->now % 100;
  }
  return 0;
}
#endif
int nvmlDeviceGetTemperature(card *c, unsigned sensor, unsigned *t) { *t = 61; return ok(); }
int nvmlDeviceGetClockInfo(card *c, unsigned type, unsigned *mhz) { *mhz = type == 1 ? 1980 : 3201; return ok(); }
int nvmlDeviceGetTotalEccErrors(card *c, unsigned type, unsigned counter, unsigned long long *n) { *n = type == 0 ? 5 : ~0ULL; return ok(); }
int nvmlDeviceGetFieldValues(card *c, int n, field *f) {
  for (int i = 0; i < n; i++) {
    f[i].ret = ok(); f[i].type = f[i].id == 82 ? 1 : 3;
    if (f[i].id == 82) f[i].v.u = 70;
    else if (f[i].id < 60) f[i].v.ull = f[i].id; /* errors of NVLink */
    else if (f[i].id > 137) f[i].v.ull = f[i].scope == ~0U ? f[i].id : 0; /* KiB over all links */
    else f[i].v.ull = 1000000000ULL * f[i].id; /* nanoseconds */
  }
  return 0;
}
