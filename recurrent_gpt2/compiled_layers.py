"""What `model.optimize_for_inference(compile=True)` adds: layers as one function in C++.

A small model spends its time between operations, not in them. So one step through the layers of a stage is one call
here, with the entry of the loop before it; behind it, the norms that exit rules compare, and the tokens that leave. The
loop itself stays outside: another number of loops needs no other code, nor does a longer text.

A row is a token at a place in a text, whose keys and values of all places before it are in a room [texts, heads,
places, head_dim]. So decoding, a batch, a prompt, those tokens of it that are still looping, and drafts at different
steps are one thing, and a row's result does not depend on what other rows there are.
"""

import ctypes
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from .active_tokens import ActiveTokens, LoopState
from .exit_policies import AccelerationExit, Policy, StepNormExit
from .fast_layers import PRECISIONS, KeptLinear, LeanRMSNorm, PackedLinear, scales_of

# Beyond these, what PyTorch does for many rows (times the square of the width) and for large matrices is faster.
MOST_WORK, MOST_WORK_IN_INT8 = 2**23, 2**28
MOST_SIZE = 2**18
PANEL = 64

SOURCE = r"""
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float vec __attribute__((vector_size(BYTES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(BYTES), aligned(4)));
// A tile of a product, whose sums fill about half of the registers.
enum { LANES = BYTES / 4, TALL = 4, WIDE = BYTES == 64 ? 4 : 2, PANEL = 64 };

// A matrix of floats is [in, out], one of bytes [out / PANEL, in / 4, PANEL, 4], with zeros where there are no more.
// Only these have a scale, and 128 times their sum, for every output, up to a whole panel. No bias: NULL.
typedef struct { const void *matrix; const float *bias, *scales; const int32_t *sums; int64_t in, out; } Linear;
typedef struct { const float *scale, *shift; float factor, least; int64_t centred; } Norm;  // no norm: scale is NULL
typedef struct { Linear qkv, out, up, down; Norm before_attention, after_attention, before_mlp, after_mlp; } Layer;
typedef struct { float *keys, *values; int64_t places; } Room;               // [texts, heads, places, size] each
typedef struct { int64_t of_change, relative_to, patience, min_loops; float threshold; } Rule;
typedef struct {
    const Layer *layers; int64_t count, heads, activation;
    const Linear *entry; const float *input;             // of a loop; else NULL
    float *state; int64_t rows, threads; const int64_t *text, *place;
    // Where rows leave by a rule; else NULL. Row r is then what was row index[r] at first, of `input`, `text`, `place`,
    // and of `final` and `loop_steps`, where it is put when it leaves.
    const Rule *rule; int64_t step, last, *hits, *index; float *update, *final; int64_t *loop_steps;
} Work;

static void add(float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

static inline __attribute__((always_inline)) void
tile(const float *x, const Linear *linear, int64_t column, float *y, const int rows, const int wide) {
    vec sums[TALL][WIDE];
    const float *w = (const float *)linear->matrix + column;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < wide; c++)
            sums[r][c] = linear->bias ? *(const vec *)(linear->bias + column + c * LANES) : (vec){0};
    for (int64_t i = 0; i < linear->in; i++, w += linear->out)
        for (int c = 0; c < wide; c++) {
            vec weights = *(const vec *)(w + c * LANES);
            for (int r = 0; r < rows; r++) sums[r][c] += x[r * linear->in + i] * weights;
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < wide; c++) *(vec *)(y + r * linear->out + column + c * LANES) = sums[r][c];
}

static void multiply_floats(const float *x, const Linear *linear, float *y, int64_t rows) {
    int64_t c = 0;
    for (; c + WIDE * LANES <= linear->out; c += WIDE * LANES)
        switch (rows) {
            case 1: tile(x, linear, c, y, 1, WIDE); break;
            case 2: tile(x, linear, c, y, 2, WIDE); break;
            case 3: tile(x, linear, c, y, 3, WIDE); break;
            default: tile(x, linear, c, y, 4, WIDE);
        }
    for (int64_t r = 0; r < rows; r++, x += linear->in, y += linear->out) {  // what is left of the columns
        int64_t rest = c;
        for (; rest + LANES <= linear->out; rest += LANES) tile(x, linear, rest, y, 1, 1);
        for (; rest < linear->out; rest++) {
            float sum = linear->bias ? linear->bias[rest] : 0;
            const float *w = (const float *)linear->matrix + rest;
            for (int64_t i = 0; i < linear->in; i++) sum += x[i] * w[i * linear->out];
            y[rest] = sum;
        }
    }
}

// Adds products of four neighbours each, of bytes without a sign and with one. Two products of 7 and 8 bits fit in 16.
static inline ints add_products(ints sums, ints x, ints w) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)w);
#elif defined(__AVX512BW__)
    return sums + (ints)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)x, (__m512i)w), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return sums + (ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)x, (__m256i)w), _mm256_set1_epi16(1));
#else
    for (int i = 0; i < BYTES; i++) sums[i / 4] += ((const uint8_t *)&x)[i] * ((const int8_t *)&w)[i];
    return sums;
#endif
}

static inline __attribute__((always_inline)) void
tile_of_bytes(const uint8_t *x, const float *scales, const Linear *linear, int64_t column, float *y, const int rows) {
    const int64_t quads = (linear->in + 3) / 4;
    const int8_t *w = (const int8_t *)linear->matrix + column / PANEL * quads * PANEL * 4 + column % PANEL * 4;
    ints sums[TALL][WIDE] = {};
    for (int64_t q = 0; q < quads; q++, w += PANEL * 4)
        for (int c = 0; c < WIDE; c++) {
            ints weights = *(const ints *)(w + c * BYTES);
            for (int r = 0; r < rows; r++) {
                int32_t quad;
                memcpy(&quad, x + (r * quads + q) * 4, 4);
                sums[r][c] = add_products(sums[r][c], (ints){} + quad, weights);
            }
        }
    for (int c = 0; c < WIDE; c++, column += LANES)
        for (int r = 0; r < rows; r++) {
            vec sum = __builtin_convertvector(sums[r][c] - *(const ints *)(linear->sums + column), vec);
            sum *= scales[r] * *(const vec *)(linear->scales + column);
            int64_t rest = linear->out - column;  // of a panel that is not full
            if (rest > 0) memcpy(y + r * linear->out + column, &sum, (rest < LANES ? rest : LANES) * sizeof(float));
        }
}

// The other factor, one row. Its scale is NaN where it holds what bytes can't: NaN or infinity.
static float to_bytes(const float *x, int64_t in, uint8_t *bytes) {
    float largest = 1e-30f;
    int32_t beyond = 0;
    for (int64_t i = 0; i < in; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    for (int64_t i = 0; i < in; i++) beyond |= !(fabsf(x[i]) <= FLT_MAX);
    float factor = 127 / largest;
    for (int64_t i = 0; i < in; i++) bytes[i] = (int32_t)rintf(x[i] * factor) + 128;
    return beyond ? NAN : largest / 127;
}

// Of any number of rows, for which there are `bytes` [rows, in], rounded up to 4, and `scales` [rows].
static void multiply_bytes(const float *x, const Linear *linear, float *y, int64_t rows, int64_t threads,
                           uint8_t *bytes, float *scales) {
    const int64_t in = linear->in, out = linear->out, row = (in + 3) / 4 * 4;
    const int64_t tiles = (out + WIDE * LANES - 1) / (WIDE * LANES);
    auto outputs = [&](int64_t tile) {  // of all rows, so that their part of the matrix stays near
        for (int64_t r = 0; r < rows; r += TALL) {
            const uint8_t *x = bytes + r * row;
            switch (rows - r) {
                case 1: tile_of_bytes(x, scales + r, linear, tile * WIDE * LANES, y + r * out, 1); break;
                case 2: tile_of_bytes(x, scales + r, linear, tile * WIDE * LANES, y + r * out, 2); break;
                case 3: tile_of_bytes(x, scales + r, linear, tile * WIDE * LANES, y + r * out, 3); break;
                default: tile_of_bytes(x, scales + r, linear, tile * WIDE * LANES, y + r * out, 4);
            }
        }
    };
    if (threads > 1) {
        #pragma omp parallel num_threads(threads)
        {
            #pragma omp for
            for (int64_t r = 0; r < rows; r++) scales[r] = to_bytes(x + r * in, in, bytes + r * row);
            #pragma omp for
            for (int64_t tile = 0; tile < tiles; tile++) outputs(tile);
        }
    } else {
        for (int64_t r = 0; r < rows; r++) scales[r] = to_bytes(x + r * in, in, bytes + r * row);
        for (int64_t tile = 0; tile < tiles; tile++) outputs(tile);
    }
    if (linear->bias)
        for (int64_t r = 0; r < rows; r++, y += out) add(y, linear->bias, out);
}

// Of at most TALL rows. Threads share the outputs, unless they share rows already: one within the other would be slow.
static void multiply(const float *x, const Linear *linear, float *y, int64_t rows, int64_t threads) {
    float scales[TALL];
    if (linear->scales)
        multiply_bytes(x, linear, y, rows, threads, (uint8_t *)__builtin_alloca(TALL * (linear->in + 4)), scales);
    else
        multiply_floats(x, linear, y, rows);
}

extern "C" void
product(const float *x, const Linear *linear, float *y, int64_t rows, int64_t threads, uint8_t *bytes, float *scales) {
    multiply_bytes(x, linear, y, rows, threads, bytes, scales);
}

static void normalise(const float *x, const Norm *norm, float *y, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        if (!norm->scale) {
            if (x != y) memcpy(y, x, width * sizeof(float));
            continue;
        }
        float mean = 0, sum = norm->least;
        if (norm->centred) {
            for (int64_t i = 0; i < width; i++) mean += x[i];
            mean /= width;
        }
        for (int64_t i = 0; i < width; i++) sum += (x[i] - mean) * (x[i] - mean);
        float factor = norm->factor / sqrtf(sum);
        for (int64_t i = 0; i < width; i++) y[i] = (x[i] - mean) * factor * norm->scale[i];
        if (norm->shift)
            for (int64_t i = 0; i < width; i++) y[i] += norm->shift[i];
    }
}

// e^x = 2^n e^r, where e^r with |r| <= ln 2 / 2 is as exact as float is after seven terms.
static inline vec exponential(vec x) {
    vec least = (vec){0} - 87, most = (vec){0} + 88, half = (vec){0} + 0.5f;
    x = x < least ? least : x > most ? most : x;
    vec scaled = x * 1.44269504f;
    ints n = __builtin_convertvector(scaled + (scaled < 0 ? -half : half), ints);
    vec r = x - __builtin_convertvector(n, vec) * 0.693147181f, sum = r * (1.f / 720) + 1.f / 120;
    sum = sum * r + 1.f / 24;
    sum = sum * r + 1.f / 6;
    sum = sum * r + 0.5f;
    return (sum * r * r + r + 1) * (vec)((n + 127) << 23);
}

static inline __attribute__((always_inline)) void
attend(const float *query, const float *keys, const float *values, float *y, float *shares, int64_t places,
       const int64_t size) {
    float factor = 1 / sqrtf(size), largest = -INFINITY, sum = 0;
    for (int64_t t = 0; t < places; t++) {
        float product = 0;
        for (int64_t i = 0; i < size; i++) product += query[i] * keys[t * size + i];
        shares[t] = product * factor;
    }
    for (int64_t t = 0; t < places; t++) largest = shares[t] > largest ? shares[t] : largest;
    for (int64_t t = 0; t < places; t += LANES) *(vec *)(shares + t) = exponential(*(vec *)(shares + t) - largest);
    for (int64_t t = 0; t < places; t++) sum += shares[t];
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec total = {0};
        for (int64_t t = 0; t < places; t++) total += shares[t] * *(const vec *)(values + t * size + i);
        *(vec *)(y + i) = total / sum;
    }
    for (; i < size; i++) {
        float total = 0;
        for (int64_t t = 0; t < places; t++) total += shares[t] * values[t * size + i];
        y[i] = total / sum;
    }
}

// Of n numbers, behind which there is room for LANES more.
static void activate(float *x, int64_t n, int64_t kind) {
    if (kind == 0) for (int64_t i = 0; i < n; i += LANES) {                                               // silu
        vec *v = (vec *)(x + i);
        *v = *v / (1 + exponential(-*v));
    }
    if (kind == 1) for (int64_t i = 0; i < n; i += LANES) {                                               // gelu_new
        vec *v = (vec *)(x + i);
        *v = *v / (1 + exponential(*v * (*v * *v * 0.044715f + 1) * -1.5957691216f));
    }
    if (kind == 2) for (int64_t i = 0; i < n; i++) x[i] = 0.5f * x[i] * (1 + erff(0.7071067812f * x[i]));  // gelu
    if (kind == 3) for (int64_t i = 0; i < n; i++) x[i] = x[i] < 0 ? 0 : x[i];                            // relu
}

static inline int64_t first_row(const Work *work, int64_t row) { return work->index ? work->index[row] : row; }

// What a block of rows is computed in: queries, keys and values stay in `wide` until others have seen them.
typedef struct { float *normed, *wide, *shares; } Scratch;

static inline int64_t inner_width(const Layer *layer) {
    return layer->up.out > 3 * layer->qkv.in ? layer->up.out : 3 * layer->qkv.in;
}

static inline Scratch scratch_of(const Layer *layer, float *room) {
    float *wide = room + TALL * layer->qkv.in;
    return {room, wide, wide + TALL * inner_width(layer) + LANES};
}

static void show(const Work *work, const Layer *layer, const Room *room, int64_t from, int64_t rows, int64_t threads,
                 Scratch scratch) {
    int64_t heads = work->heads, width = layer->qkv.in, size = width / heads;
    normalise(work->state + from * width, &layer->before_attention, scratch.normed, rows, width);
    multiply(scratch.normed, &layer->qkv, scratch.wide, rows, threads);
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = first_row(work, from + r), place = work->place[row];
        if (place < 0) continue;
        for (int64_t h = 0; h < heads; h++) {
            int64_t here = ((work->text[row] * heads + h) * room->places + place) * size;
            const float *key = scratch.wide + (r * 3 + 1) * width + h * size;
            memcpy(room->keys + here, key, size * sizeof(float));
            memcpy(room->values + here, key + width, size * sizeof(float));
        }
    }
}

static void look(const Work *work, const Layer *layer, const Room *room, int64_t from, int64_t rows, int64_t threads,
                 Scratch scratch) {
    int64_t heads = work->heads, width = layer->qkv.in, size = width / heads;
    float *state = work->state + from * width, *normed = scratch.normed, *wide = scratch.wide;
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = first_row(work, from + r), seen = work->place[row] + 1;
        for (int64_t h = 0; h < heads && seen > 0; h++) {
            int64_t first = (work->text[row] * heads + h) * room->places * size;
            const float *query = wide + r * 3 * width + h * size;
            const float *keys = room->keys + first, *values = room->values + first;
            float *y = normed + r * width + h * size;
            switch (size) {
                case 32: attend(query, keys, values, y, scratch.shares, seen, 32); break;
                case 64: attend(query, keys, values, y, scratch.shares, seen, 64); break;
                default: attend(query, keys, values, y, scratch.shares, seen, size);
            }
        }
    }
    multiply(normed, &layer->out, wide, rows, threads);
    add(state, wide, rows * width);
    normalise(state, &layer->after_attention, state, rows, width);
    normalise(state, &layer->before_mlp, normed, rows, width);
    multiply(normed, &layer->up, wide, rows, threads);
    activate(wide, rows * layer->up.out, work->activation);
    multiply(wide, &layer->down, normed, rows, threads);
    add(state, normed, rows * width);
    normalise(state, &layer->after_mlp, state, rows, width);
}

// Puts rows with enough hits in a row, or at the last step, where they belong, and moves up those behind them.
// `update` holds D(k-1) before and D(k) after.
static void let_go(Work *work, const float *before, int64_t width) {
    const Rule *rule = work->rule;
    int64_t bytes = width * sizeof(float), staying = 0, step = work->step++;
    for (int64_t r = 0; r < work->rows; r++, before += width) {
        float of_update = 0, of_previous = 0, of_change = 0, of_state = 0;
        float *state = work->state + r * width, *update = work->update + r * width;
        for (int64_t i = 0; i < width; i++) {
            float now = state[i] - before[i], change = now - update[i];
            of_previous += update[i] * update[i];
            of_update += now * now;
            of_change += change * change;
            of_state += state[i] * state[i];
            update[i] = now;
        }
        float measure = sqrtf(rule->of_change ? of_change : of_update);
        if (rule->relative_to == 1) measure /= sqrtf(of_state);
        if (rule->relative_to == 2) measure /= fmaxf(sqrtf(of_update) + sqrtf(of_previous), FLT_MIN);
        int is_hit = measure < rule->threshold && !(rule->of_change && step == 0);
        work->hits[r] = is_hit ? work->hits[r] + 1 : 0;
        if (step == work->last || (work->hits[r] >= rule->patience && step + 1 >= rule->min_loops)) {
            memcpy(work->final + work->index[r] * width, state, bytes);
            work->loop_steps[work->index[r]] = step + 1;
            continue;
        }
        if (staying < r) {
            memcpy(work->state + staying * width, state, bytes);
            memcpy(work->update + staying * width, update, bytes);
            work->hits[staying] = work->hits[r];
            work->index[staying] = work->index[r];
        }
        staying++;
    }
    work->rows = staying;
}

// Threads, if there are several here, take blocks of rows in turn, the same ones for every layer, and wait for each
// other where rows of a text are to see each other.
static void run_layers(const Work *work, const Room *rooms, const float *before, float *scratches, int64_t for_block,
                       int64_t threads) {
    const Layer *layers = work->layers;
    const int64_t rows = work->rows, width = layers->qkv.in, blocks = (rows + TALL - 1) / TALL;
    if (work->entry) {
        #pragma omp for schedule(static, 1) nowait
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t from = b * TALL, end = from + TALL < rows ? from + TALL : rows;
            multiply(before + from * width, work->entry, work->state + from * width, end - from, threads);
            for (int64_t r = from; r < end; r++)
                add(work->state + r * width, work->input + first_row(work, r) * width, width);
        }
    }
    for (int64_t i = 0; i < work->count; i++)
        for (int looks = 0; looks < 2; looks++) {
            #pragma omp for schedule(static, 1)
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t from = b * TALL, count = rows - from < TALL ? rows - from : TALL;
                const Scratch scratch = scratch_of(layers + i, scratches + b * for_block);
                (looks ? look : show)(work, layers + i, rooms + i, from, count, threads, scratch);
            }
        }
}

// A step, in place. Fails where there is no memory.
extern "C" int64_t take_step(Work *work, const Room *rooms) {
    const Layer *layers = work->layers;
    const int64_t rows = work->rows, width = layers->qkv.in, blocks = (rows + TALL - 1) / TALL;
    const int64_t for_block = TALL * (width + inner_width(layers)) + rooms->places + 2 * LANES;
    float *before = (float *)malloc((rows * width + blocks * for_block) * sizeof(float));
    if (!before) return -1;
    float *scratches = before + rows * width;
    if (work->entry) memcpy(before, work->state, rows * width * sizeof(float));
    if (blocks > 1) {
        #pragma omp parallel num_threads(work->threads)
        run_layers(work, rooms, before, scratches, for_block, 1);
    } else {
        run_layers(work, rooms, before, scratches, for_block, work->threads);
    }
    if (work->rule) let_go(work, before, width);
    free(before);
    return 0;
}
"""

# What rounding may depend on, but not what -ffast-math does beyond: that would change how the whole process rounds.
FLAGS = [
    "-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
    "-ffp-contract=fast", "-ftree-loop-vectorize",
]  # fmt: skip
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "gelu": 2, "relu": 3}
RELATIVE_TO = {"none": 0, "state": 1, "step": 2}


class Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "bias", "scales", "sums")),
        ("in_", ctypes.c_int64), ("out", ctypes.c_int64),
    ]  # fmt: skip


class Norm(ctypes.Structure):
    _fields_ = [
        ("scale", ctypes.c_void_p), ("shift", ctypes.c_void_p), ("factor", ctypes.c_float), ("least", ctypes.c_float),
        ("centred", ctypes.c_int64),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "out", "up", "down")),
        *((name, Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
    ]


class Room(ctypes.Structure):
    _fields_ = [("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("places", ctypes.c_int64)]


class Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("of_change", "relative_to", "patience", "min_loops")),
        ("threshold", ctypes.c_float),
    ]


class Work(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.c_void_p), ("count", ctypes.c_int64), ("heads", ctypes.c_int64),
        ("activation", ctypes.c_int64), ("entry", ctypes.c_void_p), ("input", ctypes.c_void_p),
        ("state", ctypes.c_void_p), ("rows", ctypes.c_int64), ("threads", ctypes.c_int64), ("text", ctypes.c_void_p),
        ("place", ctypes.c_void_p), ("rule", ctypes.c_void_p), ("step", ctypes.c_int64), ("last", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hits", "index", "update", "final", "loop_steps")),
    ]  # fmt: skip


@lru_cache
def compiled_library() -> Any:
    """The source above for the processor of this machine: half a second, and none where it was compiled before."""
    try:
        from torch._inductor.codecache import CppCodeCache  # what `torch.compile` uses

        return CppCodeCache.load_async(SOURCE, extra_flags=FLAGS, needs_vec_isa=False)()
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        raise RuntimeError(f"`compile=True` needs a C++ compiler that PyTorch finds, but: {reason}") from error


def why_not(base: Any) -> str:
    """What about the layers of a model, whose weights have been given up, is not known here; or nothing."""
    modules = [*base.layers.modules(), *base.loop_inputs.modules()]
    if any(isinstance(module, PackedLinear) and not isinstance(module, CompiledLinear) for module in modules):
        return "the model is so large that its matrices are packed (in int8, they would not be)"
    if any(type(module) in (nn.Linear, nn.RMSNorm) for module in modules):
        return "layers have hooks"
    if base.config.hidden_act not in ACTIVATIONS:
        return f"`hidden_act` {base.config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}"
    if base.config.loop_noise > 0 or base.config._attn_implementation != "sdpa":
        return "that is for models with `sdpa` attention and without `loop_noise`"
    return ""


class CompiledLinear(PackedLinear):
    """As `PackedLinearInt8`, for layers that are compiled."""

    def _pack(self, weight: torch.Tensor) -> Any:
        scales, (rows, columns) = scales_of(weight, levels=63), weight.shape
        whole = nn.functional.pad((weight / scales).round_().to(torch.int8), (0, -columns % 4, 0, -rows % PANEL))
        panels = whole.view(len(whole) // PANEL, PANEL, -1, 4).transpose(1, 2).contiguous()
        return panels, nn.functional.pad(scales[:, 0], (0, -rows % PANEL)), 128 * whole.sum(1, dtype=torch.int32)

    @property
    def known_as(self) -> Linear:
        bias = None if self.bias is None else self.bias.data_ptr()
        pointers = (tensor.data_ptr() for tensor in self._packed[1:])
        return Linear(self._packed[0].data_ptr(), bias, *pointers, self.in_features, self.out_features)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float().contiguous()
        product, rows = x.new_empty(*x.shape[:-1], self.out_features), x.numel() // self.in_features
        scratch = x.new_empty(rows, -(-self.in_features // 4) * 4, dtype=torch.uint8), x.new_empty(rows)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, product, *scratch)]
        numbers = ctypes.c_int64(rows), ctypes.c_int64(torch.get_num_threads())
        compiled_library().product(pointers[0], ctypes.byref(self.known_as), pointers[1], *numbers, *pointers[2:])
        return product


class Rows:
    """Where rows are: each in a text of the rooms, at a place of it; below 0, it is in none."""

    def __init__(self, texts: Any, places: Any):
        self.kept_alive = texts, places
        is_tensor = isinstance(texts, torch.Tensor)
        self.pointers = [x.data_ptr() if is_tensor else ctypes.addressof(x) for x in self.kept_alive]

    @classmethod
    def single(cls, place: int) -> "Rows":
        """One, of the only text: made in less time than tensors."""
        return cls((ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(place))


class CompiledLayers:
    """The layers of a base model, whose weights have been given up."""

    def __init__(self, base: Any):
        self.heads = base.config.num_attention_heads
        self.kept_alive = base, [parameter.detach() for parameter in base.parameters()]  # what pointers lead to
        self.activation = ACTIVATIONS[base.config.hidden_act]
        self.layers = (Layer * len(base.layers))(*map(_layer, base.layers))
        self.entries = [_linear(entry.state_proj) for entry in base.loop_inputs]
        in_int8 = any(isinstance(module, CompiledLinear) for module in base.layers.modules())
        self.most_work = MOST_WORK_IN_INT8 if in_int8 else MOST_WORK
        self.take_step = compiled_library().take_step
        self.take_step.restype = ctypes.c_int64

    def in_pass(self, chunk: torch.Tensor, cache: Any) -> "CompiledPass | None":
        """For a pass over a chunk [batch, length, hidden] without padding, if it is one of these."""
        is_ours = cache is not None and not cache.is_compileable  # and not a static one
        if not is_ours or torch.is_grad_enabled() or not self.knows(chunk, cache.layers[0].keys):
            return None
        return CompiledPass(self, cache, chunk)

    def knows(self, *tensors: torch.Tensor | None) -> bool:
        """Whether what there is, is in float32, and stays in it."""
        is_known = all(tensor is None or tensor.dtype is torch.float32 for tensor in tensors)
        return is_known and not torch.is_autocast_enabled("cpu")

    def __call__(
        self,
        layers: list[int],
        state: torch.Tensor,
        rooms: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: Rows,
        entry: tuple[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The state behind the layers. `entry`: of a loop, its group and projected input."""
        after = state.clone(memory_format=torch.contiguous_format)
        self.take(self.work_on(after, layers, rows, entry), rooms)
        return after

    def work_on(
        self, state: torch.Tensor, layers: list[int], rows: Rows, entry: tuple[int, torch.Tensor] | None
    ) -> Work:
        """For steps in place, of a state that is contiguous."""
        matrix, inputs = None, None
        if entry is not None:
            matrix, inputs = ctypes.addressof(self.entries[entry[0]]), entry[1].contiguous()
        work = Work(
            ctypes.addressof(self.layers) + layers[0] * ctypes.sizeof(Layer), len(layers), self.heads, self.activation,
            matrix, None if inputs is None else inputs.data_ptr(), state.data_ptr(), state.numel() // state.shape[-1],
            torch.get_num_threads(), *rows.pointers,
        )  # fmt: skip
        work.kept_alive = [state, rows, inputs]
        return work

    def take(self, work: Work, rooms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        pointers = [Room(keys.data_ptr(), values.data_ptr(), keys.shape[2]) for keys, values in rooms]
        if self.take_step(ctypes.byref(work), (Room * len(pointers))(*pointers)) != 0:
            raise MemoryError("there is no memory for a step of compiled layers.")


class CompiledPass:
    """The layers in one pass over a chunk [batch, length] without padding, for what is there when it begins."""

    def __init__(self, layers: CompiledLayers, cache: Any, chunk: torch.Tensor):
        self.layers, self.cache = layers, cache
        self.batch, self.length, self.width = chunk.shape
        self.start = cache.get_seq_length()
        self.like = chunk.new_empty(self.batch, layers.heads, 0, self.width // layers.heads)

    def takes(self, state: torch.Tensor) -> bool:
        return state.numel() * self.width <= self.layers.most_work

    def run_layers(self, layers: list[int], state: torch.Tensor) -> torch.Tensor:
        """A stage of layers that are applied once."""
        return self.layers(layers, state, self._rooms(layers), self._all_rows)

    def next_state(self, loop: LoopState) -> torch.Tensor:
        """Of the tokens that are still looping."""
        rooms = self._rooms(loop.layers, loop.steps, loop.active is not None)
        return self.layers(loop.layers, loop.state, rooms, self._rows(loop.active), (loop.group, loop.projected_input))

    def finish(self, loop: LoopState, policy: Policy | None) -> bool:
        """Takes all steps that are left, if they are of fixed loops or by a rule that is known here."""
        rule = None if policy is None else rule_of(policy)
        if not self.takes(loop.state) or loop.trajectory is not None or (policy is not None and rule is None):
            return False
        state = loop.state.clone(memory_format=torch.contiguous_format)
        if rule is None:
            entry = (loop.group, loop.projected_input)
            work = self.layers.work_on(state, loop.layers, self._rows(loop.active), entry)
        else:
            entry = (loop.group, loop.all_projected_inputs)
            work = self.layers.work_on(state, loop.layers, self._all_rows, entry)
            self._let_go(work, state, loop, rule)
        everything = self.batch * self.length
        while work.rows > 0 and loop.steps < loop.most:
            self.layers.take(work, self._rooms(loop.layers, loop.steps, work.rows < everything))
            loop.steps += 1
        if rule is None:
            loop.state = state
            loop.end()
        loop.is_done = True
        return True

    def _let_go(self, work: Work, state: torch.Tensor, loop: LoopState, rule: Rule) -> None:
        """Has rows put where they belong when they leave."""
        hits, update = loop.memory.get("hits_in_a_row"), loop.previous_update
        hits = state.new_zeros(work.rows, dtype=torch.long) if hits is None else hits
        update = state.new_zeros(work.rows, self.width) if update is None else update
        index = torch.arange(work.rows, device=state.device) if loop.active is None else loop.active.index
        loop.final = torch.empty_like(state) if loop.active is None else loop.final
        work.rule, work.step, work.last = ctypes.addressof(rule), loop.steps, loop.most - 1
        work.hits, work.index, work.update = hits.data_ptr(), index.data_ptr(), update.data_ptr()
        work.final, work.loop_steps = loop.final.data_ptr(), loop.loop_steps.data_ptr()
        work.kept_alive += [rule, hits, index, update]

    def _rooms(
        self, layers: list[int], step: int = 0, some_left: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self.cache.layers[index].reserve_next(self.length, self.like, step, some_left) for index in layers]

    def _rows(self, active: ActiveTokens | None) -> Rows:
        return self._all_rows if active is None else Rows(active.rows, active.columns + self.start)

    @cached_property
    def _all_rows(self) -> Rows:
        if self.batch == self.length == 1:
            return Rows.single(self.start)
        rows = torch.arange(self.batch * self.length, device=self.like.device)
        return Rows(rows // self.length, rows % self.length + self.start)


LAYOUTS = PRECISIONS | {"int8": CompiledLinear}


def rule_of(policy: Policy) -> Rule | None:
    """A policy as it is known here, if it is."""
    if type(policy) not in (StepNormExit, AccelerationExit):
        return None
    known: Any = policy
    return Rule(
        type(policy) is AccelerationExit, RELATIVE_TO[known.normalize], known.patience, known.min_loops, known.threshold
    )


def _linear(linear: "KeptLinear | CompiledLinear") -> Linear:
    if isinstance(linear, CompiledLinear):
        return linear.known_as
    bias = None if linear.bias is None else linear.bias.data_ptr()
    return Linear(linear._kept.data_ptr(), bias, None, None, linear.in_features, linear.out_features)


def _norm(norm: nn.Module) -> Norm:
    if isinstance(norm, LeanRMSNorm):
        return Norm(norm._scaled.data_ptr(), None, 1, float(norm._least) ** 2, 0)
    if isinstance(norm, nn.LayerNorm):
        (width,) = norm.normalized_shape
        return Norm(norm.weight.data_ptr(), norm.bias.data_ptr(), width**0.5, width * norm.eps, 1)
    return Norm()  # there is none


def _layer(block: Any) -> Layer:
    attention, mlp = block.attention, block.mlp
    return Layer(
        *map(_linear, (attention.qkv_proj, attention.o_proj, mlp.up_proj, mlp.down_proj)),
        *map(_norm, (block.attention_input_norm, block.attention_output_norm, block.mlp_input_norm,
                     block.mlp_output_norm)),
    )  # fmt: skip
