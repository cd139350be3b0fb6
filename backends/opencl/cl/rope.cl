// Rotary positions: pair i of a head turns by positions[token, component[i]] · freqs[i].
//
// The angle is never rounded to float32, which would cost 1e-2 at position 262,144: the position is cut into two parts
// that float32 holds, each product is exact as a rounded value and its error, and the turns by the four are composed.
// A work-item does one pair (or one dim that passes as it is) of a token, in all heads.

#pragma OPENCL FP_CONTRACT OFF

// (cos, sin) of a + b from those of a and b.
inline float2 turned(float2 a, float2 b) { return (float2)(a.x * b.x - a.y * b.y, a.y * b.x + a.x * b.y); }

inline float2 direction(float angle) { return (float2)(cos(angle), sin(angle)); }

inline float2 direction_of_product(float p, float f)
{
    const float angle = p * f, error = fma(p, f, -angle);
    return error == 0 ? direction(angle) : turned(direction(angle), direction(error));
}

kernel void rope(
    long tokens, long heads, long d, ROWS(float, x), ARRAY(const int, positions), long components,
    ARRAY(const float, freqs), ARRAY(const int, component), long pairs, ARRAY(float, out), long start,
    long interleaved, long inverse, FAULT_ARGS)
{
    RUN_OF_ROW(tokens, d - pairs);
    for (long c = first; c < last; c++) {
        if (c >= pairs) {
            const long i = c - pairs < start ? c - pairs : c + pairs;
            for (long h = 0; h < heads; h++) AT(out)[(row * heads + h) * d + i] = ROW(x, row * heads + h)[i];
            continue;
        }
        const long which = AT(component)[c];
        if (outside(which, 0, components, fault, node)) continue;
        const int p = AT(positions)[row * components + which];
        const int low = p & 4095;
        const float f = AT(freqs)[c];
        float2 turn = direction_of_product((float)low, f);
        if (p != low) turn = turned(direction_of_product((float)(p - low), f), turn);
        if (inverse) turn.y = -turn.y;
        const long i = start + (interleaved ? 2 * c : c), k = interleaved ? i + 1 : i + pairs;
        for (long h = 0; h < heads; h++) {
            global const float *in = ROW(x, row * heads + h);
            global float *to = AT(out) + (row * heads + h) * d;
            to[i] = in[i] * turn.x - in[k] * turn.y;
            to[k] = in[k] * turn.x + in[i] * turn.y;
        }
    }
}
