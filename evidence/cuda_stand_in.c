/* The five functions of libcuda that Mosaic GPU's compiler asks before it writes code: the answers of a Hopper GPU. For machines
   without one; nothing can be launched on it. */
int cuInit(unsigned flags) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; } /* 75, 76: 9.0 */
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "stand-in driver"; return 0; }
