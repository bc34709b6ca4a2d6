/* Scaled dot-product attention with mask, bias, soft cap, sink and lse, verified without any library:
 *
 *     cc -O2 -o sdpa sdpa.c -lm
 *     attention-ref export sdpa cases --format txt
 *     attention-ref compare sdpa cases --command './sdpa {in} {out}'
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char name[64]; int rank, n[4]; float *x; } Tensor;

/* The reader: name, rank, sizes, numbers, and so on to the end of the file. Returns how many tensors there are. */
static int read_tensors(const char *path, Tensor *t) {
    FILE *file = fopen(path, "r");
    int count = 0, ok = 1;
    for (; file && fscanf(file, "%63s %d", t->name, &t->rank) == 2; t++, count++) {
        int size = 1;
        for (int a = 0; a < t->rank; size *= t->n[a++]) ok &= fscanf(file, "%d", &t->n[a]);
        t->x = calloc(size + 1, sizeof(float));
        for (int e = 0; e < size; e++) ok &= fscanf(file, "%f", &t->x[e]);
    }
    return ok ? count : 0;
}

static Tensor tensors[32];
static int count;
static const Tensor *get(const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(tensors[i].name, name)) return &tensors[i];
    return NULL;                                    /* the argument is None */
}

/* The element (b, h, i, j); an axis of size 1 serves every index. */
static float at(const Tensor *t, int b, int h, int i, int j) {
    const int *n = t->n;
    return t->x[((b % n[0] * n[1] + h % n[1]) * n[2] + i % n[2]) * n[3] + j % n[3]];
}

/* One query: adds sum_j p_ij v_j to o, which holds dv zeros, and returns lse; a is room for Tk scores. */
static float attend(int b, int h, int i, float *a, float *o) {
    const Tensor *q = get("q"), *k = get("k"), *v = get("v"), *mask = get("mask"), *bias = get("bias");
    const Tensor *sink = get("sink"), *softcap = get("softcap");
    int Tk = k->n[2], dk = k->n[3], dv = v->n[3];
    float scale = get("scale")->x[0], sink_h = sink->x[h % sink->n[0]], m = sink_h;
    for (int j = 0; j < Tk; j++) {
        if (!at(mask, b, h, i, j)) continue;        /* a key that is hidden is never read: it may be NaN */
        a[j] = 0;
        for (int c = 0; c < dk; c++) a[j] += scale * at(q, b, h, i, c) * at(k, b, h, j, c);
        if (softcap) a[j] = softcap->x[0] * tanhf(a[j] / softcap->x[0]);
        a[j] += at(bias, b, h, i, j);
        m = fmaxf(m, a[j]);
    }
    if (m == -INFINITY) return m;                   /* a row without keys */
    float z = expf(sink_h - m);
    for (int j = 0; j < Tk; j++) {
        if (!at(mask, b, h, i, j)) continue;
        float p = expf(a[j] - m);
        z += p;
        for (int c = 0; c < dv; c++) o[c] += p * at(v, b, h, j, c);
    }
    for (int c = 0; c < dv; c++) o[c] /= z;
    return m + logf(z);
}

int main(int argc, char **argv) {
    if (argc != 3 || !(count = read_tensors(argv[1], tensors))) return fprintf(stderr, "usage: sdpa IN OUT\n"), 2;
    const int *n = get("q")->n, B = n[0], H = n[1], Tq = n[2], dv = get("v")->n[3], rows = B * H * Tq;
    float *a = calloc(get("k")->n[2] + 1, sizeof(float));
    float *o = calloc(rows * dv + 1, sizeof(float)), *lse = calloc(rows + 1, sizeof(float));
    for (int r = 0; r < rows; r++) lse[r] = attend(r / Tq / H, r / Tq % H, r % Tq, a, o + r * dv);
    FILE *out = fopen(argv[2], "w");
    if (!out) return perror(argv[2]), 2;
    fprintf(out, "o 4 %d %d %d %d\n", B, H, Tq, dv);
    for (int e = 0; e < rows * dv; e++) fprintf(out, "%.9g ", o[e]);
    fprintf(out, "\nlse 3 %d %d %d\n", B, H, Tq);
    for (int e = 0; e < rows; e++) fprintf(out, "%.9g ", lse[e]);
    return fprintf(out, "\n") < 0 || fclose(out) != 0;
}
