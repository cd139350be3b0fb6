// Rotary positions: pair i of a head turns by positions[token, component[i]] · freqs[i].
//
// The angle is never rounded to float32, which would cost 1e-2 at position 262,144: the position is cut into two parts
// that float32 holds, each product is exact as a rounded value and its error, and the turns by the four are composed.
// A work-item does one pair (or one dim that passes as it is) of a token, in all heads.


// (cos, sin) of a + b from those of a and b.
INLINE float2 turned(float2 a, float2 b) { return make_float2(a.x * b.x - a.y * b.y, a.y * b.x + a.x * b.y); }

INLINE float2 direction(float angle) { return make_float2(cosf(angle), sinf(angle)); }

INLINE float2 direction_of_product(float p, float f)
{
    const float angle = __fmul_rn(p, f), error = fmaf(p, f, -angle);
    return error == 0 ? direction(angle) : turned(direction(angle), direction(error));
}

KERNEL rope(
    i64 tokens, i64 heads, i64 d, ROWS(float, x), const int *positions, i64 components,
    const float *freqs, const int *component, i64 pairs, float *out, i64 start,
    i64 interleaved, i64 inverse, FAULT_ARGS)
{
    ENTRY_OF_ROW(tokens, d - pairs)
    const i64 c = i;
    if (c >= pairs) {
        const i64 at = c - pairs < start ? c - pairs : c + pairs;
        for (i64 h = 0; h < heads; h++) out[(row * heads + h) * d + at] = ROW(x, row * heads + h)[at];
        return;
    }
    const i64 which = component[c];
    if (outside(which, 0, components, fault, node)) return;
    const int p = positions[row * components + which];
    const int low = p & 4095;
    const float f = freqs[c];
    float2 turn = direction_of_product((float)low, f);
    if (p != low) turn = turned(direction_of_product((float)(p - low), f), turn);
    if (inverse) turn.y = -turn.y;
    const i64 j = start + (interleaved ? 2 * c : c), k = interleaved ? j + 1 : j + pairs;
    for (i64 h = 0; h < heads; h++) {
        const float *in = ROW(x, row * heads + h);
        float *to = out + (row * heads + h) * d;
        to[j] = in[j] * turn.x - in[k] * turn.y;
        to[k] = in[k] * turn.x + in[j] * turn.y;
    }
}
