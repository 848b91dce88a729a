// A decode step's pass from embeddings to scores, for `compiled.py`, which compiles and calls this file.
//
// A step multiplies a few rows by every weight there is, so its products are bound by how fast weights arrive from
// memory, and by arithmetic only if it does not overlap with that. Here four rows of a matrix are multiplied by all
// inputs while the next rows are fetched; above WIDEST rows torch's own products on packed weights are as fast. Between
// the products lie norms, rotary angles, the cache, masked attention and the gate.
//
// Nothing of torch is included or linked: its stable C functions arrive as pointers in `Torch`, so this compiles in a
// second and brings no second OpenMP runtime along. Structures have the layout of the ctypes classes in `compiled.py`.
// All numbers are fp32, all matrices row-major, and heads are made of whole vectors of LANES numbers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace {

constexpr int64_t LANES = 8;
constexpr int64_t KEYS = 128;    // keys per block of attention, which with its values stays in the second cache
constexpr int64_t ROWS = 3;      // at once: with 4 weights, 4 keys, or 4 vectors of a value, 12 sums fill 16 registers
constexpr int64_t GRAIN = 32768; // multiplications that are worth a second thread
constexpr int64_t WIDEST = 32;   // rows that products here take
constexpr int64_t NEAR = 2048;   // numbers of a weight's row, below which two groups of rows are fetched ahead

typedef float Vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t FourInts __attribute__((vector_size(16)));
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, FourInts{__VA_ARGS__})
#define SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

using Handle = void*; // a torch tensor

} // namespace

extern "C" {

struct Torch {
    int32_t (*product)(Handle, Handle, Handle*, const char*, const double**, int64_t, const char**, Handle*);
    int32_t (*from_blob)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, Handle*);
    int32_t (*data_of)(Handle, void**);
    int32_t (*release)(Handle);
    int32_t (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
    int32_t float32;
};

struct Linear {
    Handle packed, packed_bias; // for torch; without a bias both of them are null
    const float *weight, *bias; // [outputs, inputs], [outputs]
    int64_t inputs, outputs;
};

struct Layer {
    Linear qkv, output, gate_up, down;
    const float *input_norm, *output_norm, *query_norm, *key_norm; // the last two may be null
    float input_epsilon, output_epsilon, query_epsilon, key_epsilon;
};

struct Model {
    Torch torch;
    const Layer* layers;
    Linear output;
    const float* norm;
    int64_t count, hidden, heads, kv_heads, head_dim, inner;
    float epsilon, scaling;
};

struct Step {
    int64_t width, length, capacity, mask_stride;
    const float *embedded, *cos, *sin, *mask; // [width, hidden], twice [width, head_dim / 2], [width, length + width]
    float *cache, *states, *scores; // [layers, 2, kv_heads, capacity, head_dim], [width, hidden], [width, outputs]
};

} // extern "C"

namespace {

inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }
inline Vec all(float value) { return Vec{} + value; }

// The upper half of a vector added to its lower.
inline Quad folded(Vec value) {
    Quad halves[2];
    std::memcpy(halves, &value, sizeof halves);
    return halves[0] + halves[1];
}

inline float sum(Vec value) {
    const Quad four = folded(value);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// Sums of four vectors.
inline Quad sums(Vec a, Vec b, Vec c, Vec d) {
    const Quad e = folded(a), f = folded(b), g = folded(c), h = folded(d);
    const Quad first = SHUFFLE4(e, f, 0, 4, 1, 5) + SHUFFLE4(e, f, 2, 6, 3, 7);
    const Quad second = SHUFFLE4(g, h, 0, 4, 1, 5) + SHUFFLE4(g, h, 2, 6, 3, 7);
    return SHUFFLE4(first, second, 0, 1, 4, 5) + SHUFFLE4(first, second, 2, 3, 6, 7);
}

// e^x to about one unit in the last place (Cephes' polynomial); zero below the smallest normal number.
inline Vec exponential(Vec x) {
    const Ints tiny = x < all(-87.3f);
    const Vec bound = all(88.3f);
    x = x > bound ? bound : x;
    const Vec magic = all(12582912.0f); // adding it rounds to whole numbers, which its last bits then hold
    const Vec shifted = x * 1.44269504088896341f + magic;
    const Vec whole = shifted - magic;
    const Vec r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    Ints power = bits << 23;
    Ints result;
    std::memcpy(&result, &p, sizeof result);
    result = (result + power) & ~tiny;
    Vec value;
    std::memcpy(&value, &result, sizeof value);
    return value;
}

void normed(const float* from, const float* weight, float epsilon, int64_t count, float* to) {
    Vec squares = {};
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) squares += load(from + n) * load(from + n);
    float total = sum(squares);
    for (; n < count; ++n) total += from[n] * from[n];
    const float scale = 1.0f / std::sqrt(total / count + epsilon);
    for (n = 0; n + LANES <= count; n += LANES) store(to + n, load(from + n) * scale * load(weight + n));
    for (; n < count; ++n) to[n] = from[n] * scale * weight[n];
}

void gated(const float* gate, const float* up, int64_t count, float* to) {
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) {
        const Vec value = load(gate + n);
        store(to + n, value / (exponential(-value) + 1.0f) * load(up + n));
    }
    for (; n < count; ++n) to[n] = gate[n] / (1.0f + std::exp(-gate[n])) * up[n];
}

// Products of each of R rows with four columns that lie one behind another; to[row * 4 + column]. Meanwhile AHEAD cache
// lines per vector are fetched from `ahead` on.
template <int R, int AHEAD>
inline void multiplied(const float* const* rows, const float* columns, int64_t dim, const float* ahead, Quad* to) {
    Vec total[R][4] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        Vec row[R];
        for (int r = 0; r < R; ++r) row[r] = load(rows[r] + d);
        for (int c = 0; c < 4; ++c) {
            const Vec column = load(columns + c * dim + d);
            for (int r = 0; r < R; ++r) total[r][c] += row[r] * column;
        }
        for (int line = 0; line < AHEAD; ++line) __builtin_prefetch(ahead + (AHEAD * d / LANES + line) * 16);
    }
    for (int r = 0; r < R; ++r) to[r] = sums(total[r][0], total[r][1], total[r][2], total[r][3]);
}

inline float dot(const float* a, const float* b, int64_t dim) {
    Vec total = {};
    for (int64_t d = 0; d < dim; d += LANES) total += load(a + d) * load(b + d);
    return sum(total);
}

// scores[row][key] = query . key, for R queries.
template <int R>
void scored(const float* const* queries, const float* keys, int64_t count, int64_t dim, float* scores) {
    int64_t key = 0;
    for (; key + 4 <= count; key += 4) {
        Quad found[R];
        multiplied<R, 0>(queries, keys + key * dim, dim, nullptr, found);
        for (int r = 0; r < R; ++r) *reinterpret_cast<Quad*>(scores + r * KEYS + key) = found[r];
    }
    for (; key < count; ++key)
        for (int r = 0; r < R; ++r) scores[r * KEYS + key] = dot(queries[r], keys + key * dim, dim);
}

// to[row] = to[row] * fade[row] + scores[row] . values, for R rows and N vectors of each value.
template <int R, int N>
void weighed(const float* scores, const float* values, int64_t count, int64_t dim, const float* fade, float* const* to,
             int64_t offset) {
    Vec total[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) total[r][n] = load(to[r] + offset + n * LANES) * fade[r];
    for (int64_t key = 0; key < count; ++key) {
        Vec value[N];
        for (int n = 0; n < N; ++n) value[n] = load(values + key * dim + offset + n * LANES);
        for (int r = 0; r < R; ++r) {
            const float score = scores[r * KEYS + key];
            for (int n = 0; n < N; ++n) total[r][n] += value[n] * score;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(to[r] + offset + n * LANES, total[r][n]);
}

// The scores of one query, scaled and masked, become their exponentials relative to the largest score so far; returns
// what the sums over earlier keys must be multiplied by.
float softened(float* scores, const float* mask, int64_t count, float scaling, float& largest, float& total) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    Vec most = all(largest);
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) {
        const Vec value = load(scores + n) * scaling + load(mask + n);
        store(scores + n, value);
        most = value > most ? value : most;
    }
    float found = most[0];
    for (int lane = 1; lane < LANES; ++lane) found = most[lane] > found ? most[lane] : found;
    for (; n < count; ++n) {
        scores[n] = scores[n] * scaling + mask[n];
        found = scores[n] > found ? scores[n] : found;
    }
    for (; n < padded; ++n) scores[n] = -std::numeric_limits<float>::infinity();
    Vec added = {};
    for (n = 0; n < padded; n += LANES) {
        const Vec value = exponential(load(scores + n) - found);
        store(scores + n, value);
        added += value;
    }
    const float fade = std::exp(largest - found);
    total = total * fade + sum(added);
    largest = found;
    return fade;
}

struct Attention {
    const Model& model;
    const Step& step;
    const Layer& layer;
    float *projected, *attended; // [width, heads + 2 kv_heads, head_dim], [width, heads, head_dim]
    float *keys, *values;        // [kv_heads, capacity, head_dim]
    float *largest, *total;      // [heads * width], of every query's scores so far
    const float *turn, *cross;   // [width, head_dim]

    // Queries of one key-value head: row j * width + i is that of its head j at token i.
    int64_t rows() const { return model.heads / model.kv_heads * step.width; }
    int64_t key_at(int64_t kv_head, int64_t slot) const { return (kv_head * step.capacity + slot) * model.head_dim; }
};

// R queries from `row` on of one key-value head over its keys first .. first + count.
template <int R>
void attend_block(const Attention& a, int64_t kv_head, int64_t row, int64_t first, int64_t count) {
    const Model& m = a.model;
    const int64_t dim = m.head_dim, width = a.step.width, heads_before = kv_head * (m.heads / m.kv_heads);
    const float *queries[R], *masks[R];
    float *to[R], fade[R];
    for (int r = 0; r < R; ++r) {
        const int64_t head = heads_before + (row + r) / width, token = (row + r) % width;
        queries[r] = a.projected + (token * (m.heads + 2 * m.kv_heads) + head) * dim;
        masks[r] = a.step.mask + token * a.step.mask_stride + first;
        to[r] = a.attended + (token * m.heads + head) * dim;
        if (first == 0) std::memset(to[r], 0, dim * sizeof(float));
    }
    alignas(64) float scores[R * KEYS];
    scored<R>(queries, a.keys + a.key_at(kv_head, first), count, dim, scores);
    float* const largest = a.largest + kv_head * a.rows() + row;
    float* const total = a.total + kv_head * a.rows() + row;
    for (int r = 0; r < R; ++r)
        fade[r] = softened(scores + r * KEYS, masks[r], count, m.scaling, largest[r], total[r]);
    const float* const values = a.values + a.key_at(kv_head, first);
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) weighed<R, 4>(scores, values, count, dim, fade, to, d);
    for (; d < dim; d += LANES) weighed<R, 1>(scores, values, count, dim, fade, to, d);
    if (first + count < a.step.length + width) return;
    for (int r = 0; r < R; ++r)
        for (d = 0; d < dim; d += LANES) store(to[r] + d, load(to[r] + d) / total[r]);
}

// Queries begin .. end of one key-value head, whose keys pass by in blocks.
void attend_rows(const Attention& a, int64_t kv_head, int64_t begin, int64_t end) {
    const int64_t seen = a.step.length + a.step.width, tiles = (end - begin + ROWS - 1) / ROWS;
    for (int64_t row = kv_head * a.rows() + begin; row < kv_head * a.rows() + end; ++row) {
        a.largest[row] = -std::numeric_limits<float>::infinity();
        a.total[row] = 0;
    }
    for (int64_t key = 0; key < seen; key += KEYS) {
        const int64_t count = seen - key < KEYS ? seen - key : KEYS;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = begin + (end - begin) * tile / tiles;
            switch (begin + (end - begin) * (tile + 1) / tiles - row) {
            case 1: attend_block<1>(a, kv_head, row, key, count); break;
            case 2: attend_block<2>(a, kv_head, row, key, count); break;
            default: attend_block<3>(a, kv_head, row, key, count);
            }
        }
    }
}

// Rows begin .. end of all key-value heads one after another, so that threads share them evenly.
void attend_range(int64_t begin, int64_t end, void* context) {
    const Attention& a = *static_cast<const Attention*>(context);
    const int64_t rows = a.rows();
    for (int64_t head = begin / rows; head * rows < end; ++head)
        attend_rows(a, head, std::max<int64_t>(begin - head * rows, 0), std::min(end - head * rows, rows));
}

// Norms of heads where there are any, rotary angles, and keys and values to the cache; for tokens begin .. end.
void turn_range(int64_t begin, int64_t end, void* context) {
    const Attention& a = *static_cast<const Attention*>(context);
    const Model& m = a.model;
    const int64_t dim = m.head_dim, rotated = m.heads + m.kv_heads;
    for (int64_t token = begin; token < end; ++token) {
        float* const row = a.projected + token * (rotated + m.kv_heads) * dim;
        const int64_t slot = a.step.length + token;
        for (int64_t head = 0; head < rotated; ++head) {
            float* const from = row + head * dim;
            const bool is_key = head >= m.heads;
            const float* const norm = is_key ? a.layer.key_norm : a.layer.query_norm;
            if (norm) normed(from, norm, is_key ? a.layer.key_epsilon : a.layer.query_epsilon, dim, from);
            float* const to = is_key ? a.keys + a.key_at(head - m.heads, slot) : from;
            for (int64_t d = 0; d < dim; d += LANES) {
                const Vec pairs = load(from + d);
                const Vec swapped = SHUFFLE8(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6);
                store(to + d, pairs * load(a.turn + token * dim + d) + swapped * load(a.cross + token * dim + d));
            }
        }
        for (int64_t head = 0; head < m.kv_heads; ++head)
            std::memcpy(a.values + a.key_at(head, slot), row + (rotated + head) * dim, dim * sizeof(float));
    }
}

struct Product {
    const Linear& linear;
    const float* from; // [width, inputs]
    float* to;         // [width, outputs]
    int64_t width;
    bool adds; // to what is there
};

// R rows from `row` on, four outputs from `first` on.
template <int R, int AHEAD> void multiply_tile(const Product& p, int64_t row, int64_t first, const float* ahead) {
    const Linear& linear = p.linear;
    const float* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = p.from + (row + r) * linear.inputs;
    Quad found[R];
    multiplied<R, AHEAD>(rows, linear.weight + first * linear.inputs, linear.inputs, ahead, found);
    for (int r = 0; r < R; ++r) {
        Quad* const to = reinterpret_cast<Quad*>(p.to + (row + r) * linear.outputs + first);
        if (linear.bias) found[r] += *reinterpret_cast<const Quad*>(linear.bias + first);
        *to = p.adds ? *to + found[r] : found[r];
    }
}

template <int AHEAD> void multiply_rows(const Product& p, int64_t row, int64_t end, int64_t first, const float* ahead) {
    switch (end - row) {
    case 1: return multiply_tile<1, AHEAD>(p, row, first, ahead);
    case 2: return multiply_tile<2, AHEAD>(p, row, first, ahead);
    default: return multiply_tile<3, AHEAD>(p, row, first, ahead);
    }
}

// Groups begin .. end of four outputs; the last group may be smaller. The first two tiles of rows share the fetching of
// a later group's weights; behind the last one they fetch what is not there, which does no harm.
void multiply_range(int64_t begin, int64_t end, void* context) {
    const Product& p = *static_cast<const Product*>(context);
    const int64_t inputs = p.linear.inputs, outputs = p.linear.outputs, tiles = (p.width + ROWS - 1) / ROWS;
    const int64_t groups_ahead = inputs <= NEAR ? 2 : 1;
    for (int64_t first = 4 * begin; first < std::min(4 * end, outputs / 4 * 4); first += 4) {
        const float* const ahead = p.linear.weight + (first + 4 * groups_ahead) * inputs;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = p.width * tile / tiles, behind = p.width * (tile + 1) / tiles;
            if (tiles == 1) multiply_rows<2>(p, row, behind, first, ahead);
            else if (tile < 2) multiply_rows<1>(p, row, behind, first, ahead + 2 * tile * inputs);
            else multiply_rows<0>(p, row, behind, first, nullptr);
        }
    }
    for (int64_t output = std::max(4 * begin, outputs / 4 * 4); output < std::min(4 * end, outputs); ++output)
        for (int64_t row = 0; row < p.width; ++row) {
            const float* const weight = p.linear.weight + output * inputs;
            const float bias = p.linear.bias ? p.linear.bias[output] : 0;
            float& to = p.to[row * outputs + output];
            to = dot(p.from + row * inputs, weight, inputs) + bias + (p.adds ? to : 0);
        }
}

struct Gate {
    const float* both; // [width, 2 inner]
    float* to;         // [width, inner]
    int64_t inner;
};

// Numbers begin .. end of all rows.
void gate_range(int64_t begin, int64_t end, void* context) {
    const Gate& g = *static_cast<const Gate*>(context);
    for (int64_t row = begin / g.inner; row * g.inner < end; ++row) {
        const int64_t first = std::max<int64_t>(begin - row * g.inner, 0);
        const int64_t last = std::min(end - row * g.inner, g.inner);
        const float* const gate = g.both + 2 * row * g.inner;
        gated(gate + first, gate + g.inner + first, last - first, g.to + row * g.inner + first);
    }
}

class Pass {
  public:
    Pass(const Model& model, const Step& step) : m(model), s(step) {}
    ~Pass() { std::free(memory); }

    // False where torch refused an operation.
    bool run() {
        if (!prepared()) return false;
        for (int64_t index = 0; index < m.count; ++index)
            if (!through(m.layers[index], index)) return false;
        norm_rows(m.norm, m.epsilon, s.states);
        return product(m.output, s.states, s.scores, false);
    }

  private:
    const Model& m;
    const Step& s;
    float* memory = nullptr;
    float *hidden, *inputs, *projected, *attended, *gate, *turn, *cross, *largest, *total;

    bool prepared() {
        constexpr int COUNT = 9;
        float** const parts[] = {&hidden, &inputs, &projected, &attended, &gate, &turn, &cross, &largest, &total};
        const int64_t most = std::max((m.heads + 2 * m.kv_heads) * m.head_dim, 2 * m.inner);
        const int64_t columns[] = {m.hidden,   m.hidden,   most,    m.heads * m.head_dim, m.inner,
                                   m.head_dim, m.head_dim, m.heads, m.heads};
        int64_t ends[COUNT], end = 0;
        for (int n = 0; n < COUNT; ++n) ends[n] = end += (s.width * columns[n] + 15) / 16 * 16;
        memory = static_cast<float*>(std::aligned_alloc(64, end * sizeof(float)));
        if (!memory) return false;
        for (int n = 0; n < COUNT; ++n) *parts[n] = memory + (n ? ends[n - 1] : 0);
        std::memcpy(hidden, s.embedded, s.width * m.hidden * sizeof(float));
        for (int64_t n = 0; n < s.width * m.head_dim / 2; ++n) {
            turn[2 * n] = turn[2 * n + 1] = s.cos[n];
            cross[2 * n] = -s.sin[n];
            cross[2 * n + 1] = s.sin[n];
        }
        return true;
    }

    bool through(const Layer& layer, int64_t index) {
        norm_rows(layer.input_norm, layer.input_epsilon, inputs);
        if (!product(layer.qkv, inputs, projected, false)) return false;
        float* const keys = s.cache + 2 * index * m.kv_heads * s.capacity * m.head_dim;
        float* const values = keys + m.kv_heads * s.capacity * m.head_dim;
        Attention attention{m, s, layer, projected, attended, keys, values, largest, total, turn, cross};
        parallel(s.width, 8 * (m.heads + m.kv_heads) * m.head_dim, turn_range, &attention);
        parallel(m.heads * s.width, 2 * (s.length + s.width) * m.head_dim, attend_range, &attention);
        if (!product(layer.output, attended, hidden, true)) return false;
        norm_rows(layer.output_norm, layer.output_epsilon, inputs);
        if (!product(layer.gate_up, inputs, projected, false)) return false;
        Gate gating{projected, gate, m.inner};
        parallel(s.width * m.inner, 8, gate_range, &gating);
        return product(layer.down, gate, hidden, true);
    }

    void norm_rows(const float* weight, float epsilon, float* to) {
        for (int64_t token = 0; token < s.width; ++token)
            normed(hidden + token * m.hidden, weight, epsilon, m.hidden, to + token * m.hidden);
    }

    // `work` is about the multiplications of one of `count`.
    void parallel(int64_t count, int64_t work, void (*call)(int64_t, int64_t, void*), void* context) {
        m.torch.parallel_for(0, count, GRAIN / work + 1, call, context);
    }

    // The product of all rows, added to what is at `to` if `adds`.
    bool product(const Linear& linear, const float* from, float* to, bool adds) {
        if (s.width > WIDEST || linear.inputs % LANES) return torch_product(linear, from, to, adds);
        Product product{linear, from, to, s.width, adds};
        parallel((linear.outputs + 3) / 4, 4 * linear.inputs * s.width, multiply_range, &product);
        return true;
    }

    bool torch_product(const Linear& linear, const float* from, float* to, bool adds) {
        const int64_t sizes[] = {s.width, linear.inputs}, strides[] = {linear.inputs, 1};
        Handle given = nullptr, result = nullptr, bias = linear.packed_bias;
        if (m.torch.from_blob(const_cast<float*>(from), 2, sizes, strides, 0, m.torch.float32, 0, -1, &given) != 0)
            return false;
        Handle* const biases = bias ? &bias : nullptr;
        void* found = nullptr;
        const bool done =
            m.torch.product(given, linear.packed, biases, "none", nullptr, 0, nullptr, &result) == 0 &&
            m.torch.data_of(result, &found) == 0;
        if (done) {
            const float* const numbers = static_cast<const float*>(found);
            for (int64_t n = 0; n < s.width * linear.outputs; ++n) to[n] = adds ? to[n] + numbers[n] : numbers[n];
        }
        if (result) m.torch.release(result);
        m.torch.release(given);
        return done;
    }
};

} // namespace

// Final hidden states and scores of a step's tokens, their keys and values to the cache; false where torch refused.
extern "C" int32_t topo_search_pass(const Model* model, const Step* step) { return Pass(*model, *step).run(); }
