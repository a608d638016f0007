/* A signal at the n-th line of the engine that Python runs in this thread, for signals_at_lines.py.
 *
 * As with every signal, Python handles it at its next safe point: a call, a loop, the start of a function. A trace
 * function in Python could raise by itself, but where CPython 3.11 does not expect it that leaves its own code broken.
 */
#include <signal.h>
#include <string.h>

typedef struct _object PyObject; /* the few names of Python.h that are needed: its headers may not be installed */
enum { LINE = 2 };

PyObject *PyFrame_GetCode(PyObject *frame);
PyObject *PyObject_GetAttrString(PyObject *object, const char *name);
const char *PyUnicode_AsUTF8(PyObject *text);
void Py_DecRef(PyObject *object);
int PyErr_SetInterruptEx(int number);
void PyEval_SetTrace(int (*trace)(PyObject *, PyObject *, int, PyObject *), PyObject *own);

static long lines, interrupted;
static const char *folder; /* of the engine */

static int trace(PyObject *own, PyObject *frame, int event, PyObject *argument) {
    (void)own, (void)argument;
    if (event != LINE)
        return 0;
    PyObject *code = PyFrame_GetCode(frame), *name = PyObject_GetAttrString(code, "co_filename");
    const char *path = PyUnicode_AsUTF8(name);
    if (!strncmp(path, folder, strlen(folder)) && lines++ == interrupted)
        PyErr_SetInterruptEx(SIGUSR1);
    Py_DecRef(name), Py_DecRef(code);
    return 0;
}

void count_lines(long at, const char *path) {
    lines = 0, interrupted = at, folder = path;
    PyEval_SetTrace(trace, NULL);
}

long stop_counting(void) {
    PyEval_SetTrace(NULL, NULL);
    return lines;
}
