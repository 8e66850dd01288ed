/* A libnvidia-ml.so.1 without a driver: one or two cards, as the environment says.
 *
 * FAKE_NVML_ERROR    the code that nvmlInit returns, such as 18 (driver/library version mismatch)
 * FAKE_NVML_CARDS    "h100", "t4", "h100,t4", "mig" (an H100 in MIG mode with two slices), "mig-empty"
 *
 * Signatures and structures are those of NVIDIA's nvml.h, as the module pynvml calls them by ctypes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct {
  const char *key, *name, *uuid;
  unsigned long long mib;
  int major, minor, mig_slices; /* -1: no MIG mode; 0: in MIG mode without slices */
} Card;

static Card all[] = {
    {"h100", "NVIDIA H100 80GB HBM3", "GPU-11111111-aaaa", 81559, 9, 0, -1},
    {"t4", "Tesla T4", "GPU-22222222-bbbb", 15360, 7, 5, -1},
    {"mig", "NVIDIA H100 80GB HBM3", "GPU-33333333-cccc", 81559, 9, 0, 2},
    {"mig-empty", "NVIDIA H100 80GB HBM3", "GPU-33333333-cccc", 81559, 9, 0, 0},
    {"slice", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-44444444-dddd", 9856, 9, 0, -1},
    {"slice", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-55555555-eeee", 40320, 9, 0, -1},
};
static Card *cards[2];
static unsigned int count;

int nvmlInitWithFlags(unsigned int flags) {
  const char *error = getenv("FAKE_NVML_ERROR"), *wanted = getenv("FAKE_NVML_CARDS");
  char keys[64];
  (void)flags;
  if (error) return atoi(error);
  count = 0;
  snprintf(keys, sizeof keys, "%s", wanted ? wanted : "h100");
  for (char *key = strtok(keys, ","); key && count < 2; key = strtok(NULL, ","))
    for (int i = 0; i < 4; i++)
      if (!strcmp(key, all[i].key)) cards[count++] = &all[i];
  return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "made up"; }

int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
  snprintf(text, length, "580.95.05");
  return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *number) {
  *number = count;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Card **card) {
  if (index >= count) return INVALID_ARGUMENT;
  *card = cards[index];
  return SUCCESS;
}

int nvmlDeviceGetName(Card *card, char *text, unsigned int length) {
  snprintf(text, length, "%s", card->name);
  return SUCCESS;
}

int nvmlDeviceGetUUID(Card *card, char *text, unsigned int length) {
  snprintf(text, length, "%s", card->uuid);
  return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Card *card, int *major, int *minor) {
  *major = card->major;
  *minor = card->minor;
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Card *card, unsigned long long *memory) { /* total, free, used */
  memory[0] = card->mib << 20;
  memory[1] = memory[0] - (1ull << 30);
  memory[2] = 1ull << 30;
  return SUCCESS;
}

int nvmlDeviceGetMigMode(Card *card, unsigned int *current, unsigned int *pending) {
  if (card->major < 8) return NOT_SUPPORTED;
  *current = *pending = card->mig_slices >= 0;
  return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Card *card, unsigned int *number) {
  (void)card;
  *number = 7;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Card *card, unsigned int index, Card **slice) {
  if (index >= (unsigned int)card->mig_slices) return NOT_FOUND;
  *slice = &all[4 + index];
  return SUCCESS;
}

typedef struct {
  unsigned int pid;
  unsigned long long used;
  unsigned int gpu_instance, compute_instance;
} Process;

int nvmlDeviceGetComputeRunningProcesses_v3(Card *card, unsigned int *number, Process *processes) {
  if (card->mig_slices >= 0 || strcmp(card->key, "h100")) {
    *number = 0;
    return SUCCESS;
  }
  if (!processes || *number < 1) {
    *number = 1;
    return INSUFFICIENT_SIZE;
  }
  *number = 1;
  processes[0] = (Process){(unsigned int)getpid(), 512ull << 20, 0, 0};
  return SUCCESS;
}
