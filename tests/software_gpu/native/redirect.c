// redirect.so, an auditor of the dynamic linker (LD_AUDIT, see rtld-audit(7)): programs that load a library of
// NVIDIA, by name or by path, get that of the software GPU. No file in site-packages is overwritten, although torch,
// torchvision and vLLM open the files in their packages.
#define _GNU_SOURCE
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Prefixes of file names, and the libraries that are loaded instead.
static const struct {
    const char* prefix;
    const char* replacement;
} replaced[] = {
    {"libcuda.so", "libcuda.so.1"},
    {"libcudart.", "libcudart.so.13"},
    {"libcudart-", "libcudart.so.13"},
    {"libnccl.so", "libnccl.so.2"},
    {"libnvidia-ml.so", "libnvidia-ml.so.1"},
};

unsigned la_version(unsigned version) { return version; }

char* la_objsearch(const char* name, uintptr_t* cookie, unsigned flag) {
    static char path[4096];
    const char* folder = getenv("SOFTWARE_GPU_LIBRARIES");
    const char* slash = strrchr(name, '/');
    const char* file = slash ? slash + 1 : name;
    if (!folder || flag != LA_SER_ORIG) {
        return (char*)name;
    }
    for (size_t i = 0; i < sizeof replaced / sizeof *replaced; i++) {
        if (strncmp(file, replaced[i].prefix, strlen(replaced[i].prefix)) == 0) {
            // Under the requested name, if it exists: a package may have its own name for a copy.
            snprintf(path, sizeof path, "%s/%s", folder, file);
            if (access(path, F_OK) != 0) {
                snprintf(path, sizeof path, "%s/%s", folder, replaced[i].replacement);
            }
            return path;
        }
    }
    return (char*)name;
}
