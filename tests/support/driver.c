/* A driver without a GPU: what dali_stream calls of libcuda and libnvcuvid, for tests of what it makes of the answers.
 *
 *   FAKE_GPUS=a100,l4          the GPUs: a100, h100, l4, b200, mig (an A100's slice without engines), t4
 *   FAKE_FAILS=cuInit=803,...  calls that fail, with the error they return; cuvidGetDecoderCaps:av1=801 fails for one codec
 *   FAKE_OUTPUTS=4             mask of the output formats of every codec
 *   FAKE_LIMITS=80,144,4096,4096,65536  least height and width, largest height and width, and macroblocks of every codec
 *   FAKE_CALLS=path            a file that gets the name of each call, a line each
 *
 * One source for both libraries; -DVIDEO makes libnvcuvid. Capabilities as NVIDIA's "Video Encode and Decode Support Matrix"
 * has them. The layout of the structure is that of cuviddec.h.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int codec, chroma;
    unsigned depth_minus_8, reserved1[3];
    unsigned char supported, engines;
    unsigned short outputs;
    unsigned max_width, max_height, max_macroblocks;
    unsigned short min_width, min_height;
    unsigned char histogram, counter_bits;
    unsigned short max_bins;
    unsigned reserved3[10];
} Caps;

enum { MPEG4 = 2, H264 = 4, JPEG = 5, HEVC = 8, VP8 = 9, VP9 = 10, AV1 = 11 };
enum { C420 = 1, C422 = 2, C444 = 3 };

struct Gpu {
    const char *key, *name;
    int major, minor, engines, av1, c422; /* av1: whether it decodes AV1; c422: H.264 and HEVC 4:2:2 (Blackwell) */
    unsigned long long gib;
};

int fake_called(const char *call);
const struct Gpu *fake_gpu(int index);
extern int fake_current;

#ifndef VIDEO

static const struct Gpu GPUS[] = {
    {"t4", "Tesla T4", 7, 5, 2, 0, 0, 15},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 5, 0, 0, 80},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 7, 0, 0, 80},
    {"l4", "NVIDIA L4", 8, 9, 4, 1, 0, 23},
    {"b200", "NVIDIA B200", 10, 0, 7, 1, 1, 180},
    {"mig", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 8, 0, 0, 0, 0, 10},
};

int fake_current = -1;
static int initialised, retained, pushed;

/* Notes a call; returns the error it is to fail with. */
int fake_called(const char *call) {
    const char *path = getenv("FAKE_CALLS"), *fails = getenv("FAKE_FAILS");
    size_t length = strlen(call);
    if (path) {
        FILE *file = fopen(path, "a");
        fprintf(file, "%s\n", call);
        fclose(file);
    }
    while (fails && *fails) {
        if (!strncmp(fails, call, length) && fails[length] == '=') return atoi(fails + length + 1);
        fails = strchr(fails, ',');
        if (fails) fails++;
    }
    return 0;
}

static int count(void) {
    const char *names = getenv("FAKE_GPUS");
    int n = names && *names ? 1 : 0;
    for (; names && *names; names++) n += *names == ',';
    return n;
}

const struct Gpu *fake_gpu(int index) {
    const char *names = getenv("FAKE_GPUS");
    for (int i = 0; names && i < index; i++) {
        names = strchr(names, ',');
        if (names) names++;
    }
    for (size_t i = 0; names && i < sizeof GPUS / sizeof *GPUS; i++) {
        size_t length = strlen(GPUS[i].key);
        if (!strncmp(names, GPUS[i].key, length) && (names[length] == ',' || !names[length])) return GPUS + i;
    }
    fprintf(stderr, "fake driver: no GPU %d in FAKE_GPUS\n", index);
    abort();
}

#define CALLED(name) do { int error = fake_called(name); if (error) return error; if (!initialised) return 3; } while (0)

int cuInit(unsigned flags) {
    int error = fake_called("cuInit");
    if (error) return error;
    if (!count()) return 100; /* CUDA_ERROR_NO_DEVICE */
    initialised = flags == 0;
    return 0;
}

int cuDriverGetVersion(int *version) {
    const char *asked = getenv("FAKE_CUDA");
    CALLED("cuDriverGetVersion");
    *version = asked ? atoi(asked) : 13000;
    return 0;
}

int cuDeviceGetCount(int *n) {
    CALLED("cuDeviceGetCount");
    *n = count();
    return 0;
}

int cuDeviceGet(int *device, int index) {
    CALLED("cuDeviceGet");
    if (index < 0 || index >= count()) return 101; /* CUDA_ERROR_INVALID_DEVICE */
    *device = 40 + index; /* a handle is not an index */
    return 0;
}

int cuDeviceGetName(char *name, int length, int device) {
    CALLED("cuDeviceGetName");
    snprintf(name, (size_t)length, "%s", fake_gpu(device - 40)->name);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    CALLED("cuDeviceTotalMem_v2");
    *bytes = (size_t)fake_gpu(device - 40)->gib << 30;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALLED("cuDeviceGetAttribute");
    if (attribute != 75 && attribute != 76) return 1;
    *value = attribute == 75 ? fake_gpu(device - 40)->major : fake_gpu(device - 40)->minor;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    CALLED("cuDevicePrimaryCtxRetain");
    retained++;
    *context = (void *)(intptr_t)(0x700000000000 + device); /* a pointer that 32 bits do not hold */
    return 0;
}

int cuCtxPushCurrent_v2(void *context) {
    CALLED("cuCtxPushCurrent_v2");
    fake_current = (int)((intptr_t)context - 0x700000000000) - 40;
    pushed++;
    return 0;
}

int cuCtxPopCurrent_v2(void **context) {
    CALLED("cuCtxPopCurrent_v2");
    if (!pushed--) abort();
    *context = NULL;
    fake_current = -1;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    CALLED("cuDevicePrimaryCtxRelease_v2");
    if (!retained-- || device < 40) abort();
    return 0;
}

int cuGetErrorName(int error, const char **name) {
    static const struct { int error; const char *name; } names[] = {
        {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {34, "CUDA_ERROR_STUB_LIBRARY"},
        {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"}, {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"},
        {800, "CUDA_ERROR_NOT_PERMITTED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"}, {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
        {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}, {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].error == error) return *name = names[i].name, 0;
    return *name = NULL, 1;
}

#else

static int decodes(const struct Gpu *gpu, int codec, int chroma, unsigned depth) {
    switch (codec) {
    case MPEG4: case VP8: case JPEG: return chroma == C420 && depth == 8;
    case H264: return (chroma == C420 && depth == 8) || (gpu->c422 && chroma <= C422 && chroma && depth <= 10);
    case HEVC: return chroma == C420 || chroma == C444 || (gpu->c422 && chroma == C422 && depth <= 10);
    case VP9: return chroma == C420;
    case AV1: return gpu->av1 && chroma <= C420 && depth <= 10;
    }
    return 0;
}

int cuvidGetDecoderCaps(Caps *caps) {
    static const char *codecs[] = {[MPEG4] = "mpeg4", [H264] = "h264", [JPEG] = "mjpeg", [HEVC] = "hevc", [VP8] = "vp8",
                                   [VP9] = "vp9", [AV1] = "av1"};
    char call[64];
    int error = fake_called("cuvidGetDecoderCaps");
    if (error) return error;
    if (sizeof *caps != 88) abort();
    if (fake_current < 0) return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    snprintf(call, sizeof call, "cuvidGetDecoderCaps:%s", codecs[caps->codec]);
    if ((error = fake_called(call))) return error;
    const struct Gpu *gpu = fake_gpu(fake_current);
    unsigned depth = caps->depth_minus_8 + 8, large = caps->codec == H264 || caps->codec == VP8 ? 4096 : 8192;
    caps->supported = (unsigned char)decodes(gpu, caps->codec, caps->chroma, depth);
    caps->engines = caps->supported ? (unsigned char)gpu->engines : 0;
    const char *outputs = getenv("FAKE_OUTPUTS");
    caps->outputs = !caps->supported ? 0 : outputs && *outputs ? (unsigned short)atoi(outputs) : caps->chroma == C444 ? (depth == 8 ? 4 : 8) : depth == 8 ? 1 : 3;
    caps->max_width = caps->supported ? large : 0;
    caps->max_height = caps->supported ? large : 0;
    caps->max_macroblocks = caps->supported ? large * large / 256 : 0;
    caps->min_width = caps->supported ? 144 : 0;
    caps->min_height = caps->supported ? 80 : 0;
    unsigned height, width;
    const char *limits = getenv("FAKE_LIMITS");
    if (limits && caps->supported && sscanf(limits, "%u,%u,%u,%u,%u", &height, &width, &caps->max_height, &caps->max_width,
                                            &caps->max_macroblocks) == 5) {
        caps->min_height = (unsigned short)height;
        caps->min_width = (unsigned short)width;
    }
    return 0;
}

#endif
