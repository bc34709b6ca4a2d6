// Scaled dot-product attention with mask, bias, soft cap, sink and lse, in float32, with nothing but std:
//
//     rustc --edition 2021 -O sdpa.rs
//     attention-ref export sdpa cases --format txt
//     attention-ref compare sdpa cases --command './sdpa {in} {out}'
use std::collections::HashMap;
use std::fmt::Write;

struct Tensor { shape: Vec<usize>, data: Vec<f32> }

/// The reader: name, rank, sizes, numbers, and so on to the end of the text. An argument that is None is not there.
fn read(text: &str) -> HashMap<String, Tensor> {
    let (mut words, mut tensors) = (text.split_whitespace(), HashMap::new());
    while let Some(name) = words.next() {
        let rank: usize = words.next().unwrap().parse().unwrap();
        let shape: Vec<usize> = words.by_ref().take(rank).map(|word| word.parse().unwrap()).collect();
        let data = words.by_ref().take(shape.iter().product()).map(|word| word.parse().unwrap()).collect();
        tensors.insert(name.to_string(), Tensor { shape, data });
    }
    tensors
}

/// The same the other way.
fn write(text: &mut String, name: &str, shape: &[usize], data: &[f32]) {
    let join = |words: Vec<String>| words.join(" ");
    let sizes = join(shape.iter().map(|n| n.to_string()).collect());
    writeln!(text, "{name} {} {sizes}\n{}", shape.len(), join(data.iter().map(|x| x.to_string()).collect())).unwrap();
}

impl Tensor {
    /// The element (b, h, i, j); an axis of size 1 serves every index.
    fn at(&self, place: [usize; 4]) -> f32 {
        self.data[place.iter().zip(&self.shape).fold(0, |offset, (index, size)| offset * size + index % size)]
    }
}

/// One query: adds its output to o, which holds dv zeros, and returns its lse.
fn attend(x: &HashMap<String, Tensor>, b: usize, h: usize, i: usize, o: &mut [f32]) -> f32 {
    let (q, k, v, scale, softcap) = (&x["q"], &x["k"], &x["v"], x["scale"].data[0], x.get("softcap"));
    let sink = x["sink"].data[h % x["sink"].data.len()];
    let mut scores = Vec::new();
    for j in (0..k.shape[2]).filter(|&j| x["mask"].at([b, h, i, j]) != 0.0) {   // a hidden key is never read
        let mut s: f32 = (0..k.shape[3]).map(|c| scale * q.at([b, h, i, c]) * k.at([b, h, j, c])).sum();
        if let Some(cap) = softcap {
            s = cap.data[0] * (s / cap.data[0]).tanh();
        }
        scores.push((j, s + x["bias"].at([b, h, i, j])));
    }
    let m = scores.iter().fold(sink, |m, &(_, a)| m.max(a));
    if m == f32::NEG_INFINITY {
        return m;                                                               // a row without keys
    }
    let z = scores.iter().fold((sink - m).exp(), |z, &(_, a)| z + (a - m).exp());
    for (j, a) in scores {
        for (c, o) in o.iter_mut().enumerate() {
            *o += (a - m).exp() / z * v.at([b, h, j, c]);
        }
    }
    m + z.ln()
}

fn main() {
    let [_, input, output] = std::env::args().collect::<Vec<_>>().try_into().expect("usage: sdpa IN OUT");
    let x = read(&std::fs::read_to_string(input).expect("cannot read the input"));
    let (rows, dv) = (x["q"].shape[..3].to_vec(), x["v"].shape[3]);
    let (count, heads, queries) = (rows.iter().product(), rows[1], rows[2]);
    let (mut o, mut lse) = (vec![0.0; count * dv], vec![0.0; count]);
    for r in 0..count {
        lse[r] = attend(&x, r / queries / heads, r / queries % heads, r % queries, &mut o[r * dv..][..dv]);
    }
    let mut text = String::new();
    write(&mut text, "o", &[&rows[..], &[dv]].concat(), &o);
    write(&mut text, "lse", &rows, &lse);
    std::fs::write(output, text).expect("cannot write the output");
}
