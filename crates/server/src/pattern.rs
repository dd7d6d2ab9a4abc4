//! What is written for a token, so that every byte can be checked: plain 32-bit arithmetic.
//!
//! The token `id` at `position` fills its keys and values with the words
//! `a(id, position) + c(w)`, where `w` numbers the words of a token in the order
//! `[layer][key or value][head][word]` of the whole model. The check of a sequence is the sum, over
//! its positions, of `m(position)` times the sum of the words found there. A device has to read
//! every word for it; the host adds one product a token. All arithmetic wraps, words are little
//! endian.
//!
//! `m` is odd, so one word that differs changes the check.

use vmm_kv::{KvShape, Part};

/// Bytes of a word.
pub const WORD_BYTES: u64 = 4;

/// A permutation of the 32-bit numbers in which each bit depends on all (Wellons' `lowbias32`).
pub const fn mix(value: u32) -> u32 {
    let mut x = value;
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// What all words of one token have in common.
pub const fn token_base(id: u32, position: u32) -> u32 {
    mix(id.wrapping_mul(0x9e37_79b9) ^ mix(position.wrapping_add(0x85eb_ca6b)))
}

/// What all tokens' words with the number `word` have in common.
pub const fn word_base(word: u32) -> u32 {
    mix(word ^ 0x5bd1_e995)
}

/// By what the words at a position are multiplied in the check; odd.
pub const fn position_factor(position: u32) -> u32 {
    mix(position.wrapping_add(0xc2b2_ae35)) | 1
}

/// The token that follows a sequence with this check, whose last token is at `position`: it depends
/// on every byte that was read.
pub const fn next_token(check: u32, position: u32, vocabulary: u32) -> u32 {
    mix(check ^ mix(position)) % if vocabulary == 0 { 1 } else { vocabulary }
}

/// The words of a model's tokens, as far as they lie on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// [`word_base`] of each word of a token on this device: `[layer][part][head][word]`.
    bases: Vec<u32>,
    /// Their sum.
    sum: u32,
    row_words: usize,
}

impl Pattern {
    /// For the heads of `shape`, of a model that has `model_heads` in all. `None` if a head is no
    /// multiple of a word, or a token has more than 2^32 words.
    pub fn new(shape: &KvShape, model_heads: u32) -> Option<Pattern> {
        let head_words = shape.head_bytes().checked_div(WORD_BYTES)?;
        let rows = u64::from(shape.layers()) * 2;
        let model_words = rows.checked_mul(u64::from(model_heads))?.checked_mul(head_words)?;
        let is_whole = shape.head_bytes().is_multiple_of(WORD_BYTES);
        let last_head = shape.first_head().checked_add(shape.kv_heads())?;
        if !is_whole || model_words > u64::from(u32::MAX) || last_head > model_heads {
            return None;
        }
        let row_words = u64::from(shape.kv_heads()) * head_words;
        let first = u64::from(shape.first_head()) * head_words;
        let row = u64::from(model_heads) * head_words;
        // Below `model_words`, which fits.
        let number = |index: u64| (index / row_words * row + first + index % row_words) as u32;
        let bases: Vec<u32> = (0..rows * row_words).map(|index| word_base(number(index))).collect();
        let sum = bases.iter().fold(0, |sum: u32, base| sum.wrapping_add(*base));
        Some(Pattern { bases, sum, row_words: row_words as usize })
    }

    /// Words of one token.
    pub fn token_words(&self) -> u32 {
        self.bases.len() as u32 // at most 2^32 - 1, see `new`
    }

    /// The sum of [`word_base`] over the words of a token.
    pub fn base_sum(&self) -> u32 {
        self.sum
    }

    /// [`word_base`] of the words of a layer's keys, or values, heads in order.
    pub fn row(&self, layer: u32, part: Part) -> &[u32] {
        let first = (2 * layer as usize + part.index() as usize) * self.row_words;
        self.bases.get(first..first + self.row_words).unwrap_or(&[])
    }

    /// [`word_base`] of all words of a token: `[layer][part][head][word]`.
    pub fn token(&self) -> &[u32] {
        &self.bases
    }

    /// What a token adds to the check of its sequence.
    pub fn contribution(&self, id: u32, position: u32) -> u32 {
        let words = self.token_words().wrapping_mul(token_base(id, position));
        position_factor(position).wrapping_mul(words.wrapping_add(self.sum))
    }

    /// The check of a sequence.
    pub fn check(&self, tokens: &[u32]) -> u32 {
        let numbered = (0u32..).zip(tokens);
        numbered
            .fold(0, |sum: u32, (position, id)| sum.wrapping_add(self.contribution(*id, position)))
    }

    /// The tokens that a prompt is answered with, at most `count`.
    pub fn answer(&self, prompt: &[u32], count: usize, vocabulary: u32) -> Vec<u32> {
        let mut check = self.check(prompt);
        let mut position = (prompt.len() as u32).saturating_sub(1);
        let mut answer = Vec::with_capacity(count);
        for _ in 0..count {
            let id = next_token(check, position, vocabulary);
            answer.push(id);
            position += 1;
            check = check.wrapping_add(self.contribution(id, position));
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use vmm_kv::Dtype;

    use super::*;

    fn shape() -> KvShape {
        KvShape::new(3, 4, 6, Dtype::F16).unwrap()
    }

    /// The definition, word by word.
    fn by_words(shape: &KvShape, model_heads: u32, tokens: &[u32]) -> u32 {
        let head_words = (shape.head_bytes() / WORD_BYTES) as u32;
        let mut check = 0u32;
        for (position, id) in (0u32..).zip(tokens) {
            for (layer, part, head, i) in (0..shape.layers())
                .flat_map(|l| [0, 1].map(|p| (l, p)))
                .flat_map(|(l, p)| (0..shape.kv_heads()).map(move |h| (l, p, h)))
                .flat_map(|(l, p, h)| (0..head_words).map(move |i| (l, p, h, i)))
            {
                let head = shape.first_head() + head;
                let number = ((layer * 2 + part) * model_heads + head) * head_words + i;
                let word = token_base(*id, position).wrapping_add(word_base(number));
                check = check.wrapping_add(position_factor(position).wrapping_mul(word));
            }
        }
        check
    }

    #[test]
    fn the_host_finds_the_check_without_reading_words() {
        let pattern = Pattern::new(&shape(), 4).unwrap();
        assert_eq!(pattern.token_words(), 3 * 2 * 4 * 3);
        let tokens = [7, 7, 0, u32::MAX, 123];
        assert_eq!(pattern.check(&tokens), by_words(&shape(), 4, &tokens));
    }

    #[test]
    fn the_checks_of_shards_add_up_to_that_of_the_model() {
        let whole = Pattern::new(&shape(), 4).unwrap();
        let tokens = [1, 2, 3];
        let shards = (0..2).map(|index| {
            let shard = shape().shard(index, 2).unwrap();
            let pattern = Pattern::new(&shard, 4).unwrap();
            assert_eq!(pattern.check(&tokens), by_words(&shard, 4, &tokens));
            pattern.check(&tokens)
        });
        let sum = shards.fold(0u32, u32::wrapping_add);
        assert_eq!(sum, whole.check(&tokens));
    }

    #[test]
    fn one_word_or_one_exchange_changes_the_check() {
        let pattern = Pattern::new(&shape(), 4).unwrap();
        let right = pattern.check(&[5, 6, 7, 8]);
        for other in [[6, 5, 7, 8], [5, 6, 7, 9], [5, 5, 7, 8], [8, 7, 6, 5]] {
            assert_ne!(pattern.check(&other), right, "{other:?}");
        }
        for position in 0..1000 {
            assert_eq!(position_factor(position) & 1, 1);
        }
    }

    #[test]
    fn words_of_a_row_are_those_of_the_token() {
        let pattern = Pattern::new(&shape(), 4).unwrap();
        let rows = (0..3).flat_map(|layer| [Part::Key, Part::Value].map(|part| (layer, part)));
        let joined: Vec<u32> =
            rows.flat_map(|(layer, part)| pattern.row(layer, part).to_vec()).collect();
        assert_eq!(joined, pattern.token());
        assert!(pattern.row(3, Part::Key).is_empty());
    }

    #[test]
    fn an_answer_is_the_sequence_that_its_own_checks_give() {
        let pattern = Pattern::new(&shape(), 4).unwrap();
        let mut tokens = vec![104, 105];
        let answer = pattern.answer(&tokens, 5, 256);
        for id in &answer {
            let position = tokens.len() as u32 - 1;
            assert_eq!(*id, next_token(pattern.check(&tokens), position, 256));
            tokens.push(*id);
        }
        assert_eq!(answer.len(), 5);
        assert!(answer.iter().all(|id| *id < 256));
    }

    #[test]
    fn shapes_without_whole_words_are_refused() {
        let odd = KvShape::new(1, 1, 3, Dtype::F16).unwrap();
        assert_eq!(Pattern::new(&odd, 1), None);
        assert_eq!(Pattern::new(&shape(), 3), None);
    }
}
