// Scaled dot-product attention with mask, bias, soft cap, sink and lse, in float64, with its own reader and writer:
//
//     attention-ref export sdpa cases --dtype float64
//     attention-ref compare sdpa cases --command 'node sdpa.mjs {in} {out}'
import { readFileSync, writeFileSync } from "node:fs";

// A safetensors file: 8 bytes of header length, a JSON header, the numbers. An argument that is None is not there.
function read(path) {
  const bytes = readFileSync(path), start = 8 + Number(bytes.readBigUInt64LE(0));
  const header = JSON.parse(bytes.subarray(8, start)), tensors = {};
  const types = { F64: Float64Array, F32: Float32Array, I64: BigInt64Array, U8: Uint8Array, BOOL: Uint8Array };
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    const copy = new Uint8Array(bytes.subarray(start + from, start + to));          // a copy is aligned, a view is not
    tensors[name] = { shape, data: new types[dtype](copy.buffer) };
  }
  return tensors;
}

// The same the other way; tensors are { name: { shape, data: Float64Array } }.
function write(path, tensors) {
  const header = {}, parts = [];
  let offset = 0;
  for (const [name, { shape, data }] of Object.entries(tensors)) {
    header[name] = { dtype: "F64", shape, data_offsets: [offset, offset += data.byteLength] };
    parts.push(new Uint8Array(data.buffer));
  }
  const text = Buffer.from(JSON.stringify(header)), size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(text.length));
  writeFileSync(path, Buffer.concat([size, text, ...parts]));
}

// The element (b, h, i, j); an axis of size 1 serves every index.
function at({ shape: [B, H, T, d], data }, b, h, i, j) {
  return data[((b % B * H + h % H) * T + i % T) * d + j % d];
}

function attention({ q, k, v, mask, bias, sink, scale, softcap }) {
  const [B, H, Tq, dk] = q.shape, Tk = k.shape[2], dv = v.shape[3];
  const o = new Float64Array(B * H * Tq * dv), lse = new Float64Array(B * H * Tq);
  for (let row = 0; row < lse.length; row++) {
    const b = Math.floor(row / Tq / H), h = Math.floor(row / Tq) % H, i = row % Tq;
    const a = new Float64Array(Tk).fill(-Infinity), sinkH = sink.data[h % sink.data.length];
    for (let j = 0; j < Tk; j++) {
      if (!at(mask, b, h, i, j)) continue;                            // a hidden key is never read: it may be NaN
      let s = 0;
      for (let c = 0; c < dk; c++) s += scale.data[0] * at(q, b, h, i, c) * at(k, b, h, j, c);
      if (softcap) s = softcap.data[0] * Math.tanh(s / softcap.data[0]);
      a[j] = s + at(bias, b, h, i, j);
    }
    const m = a.reduce((x, y) => Math.max(x, y), sinkH);
    lse[row] = m;
    if (m === -Infinity) continue;                                    // a row without keys: o stays 0
    const p = a.map(s => Math.exp(s - m)), z = p.reduce((x, y) => x + y, Math.exp(sinkH - m));
    for (let j = 0; j < Tk; j++)
      for (let c = 0; c < dv && p[j] > 0; c++) o[row * dv + c] += p[j] / z * at(v, b, h, j, c);
    lse[row] = m + Math.log(z);
  }
  return { o: { shape: [B, H, Tq, dv], data: o }, lse: { shape: [B, H, Tq], data: lse } };
}

const [input, output] = process.argv.slice(2);
write(output, attention(read(input)));
