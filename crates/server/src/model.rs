//! [`ModelSpec`]: what the server has to know of a model.

use std::path::Path;

use serde::{Deserialize, Serialize};
use vmm_kv::{Dtype, KvShape, LayoutError};

use crate::pattern::Pattern;

/// Tokens are bytes: as many differ.
pub const VOCABULARY: u32 = 256;

/// A model, as far as memory and time go. All lengths in bytes or tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// By what name requests ask for it.
    pub name: String,
    /// Layers.
    pub layers: u32,
    /// Heads for keys and values.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Bits of an element: 8, 16 or 32.
    pub element_bits: u32,
    /// The longest context.
    pub max_tokens: u32,
    /// Memory of the weights.
    pub weights_bytes: u64,
    /// Tokens of a block, in the paged form.
    pub block_tokens: u32,
}

/// A model that cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// There is no such preset, and no such file.
    #[error("model {0:?}: expected one of {names}, or a JSON file", names = PRESETS.join(", "))]
    Unknown(String),
    /// The file cannot be read.
    #[error("{path}: {cause}")]
    File {
        /// Which.
        path: String,
        /// Why.
        cause: std::io::Error,
    },
    /// The file says something else than a model.
    #[error("{path}: {cause}")]
    Text {
        /// Which.
        path: String,
        /// Where and what.
        cause: serde_json::Error,
    },
    /// A name that cannot be written in figures, logs and thread lists.
    #[error(
        "a model called {0:?}: expected one character at least, and none that cannot be printed"
    )]
    Name(String),
    /// A number that is none of those possible.
    #[error("model {model}: {field} = {value}: expected {expected}")]
    Field {
        /// The model.
        model: String,
        /// Of what.
        field: &'static str,
        /// What was given.
        value: u64,
        /// What would be accepted.
        expected: &'static str,
    },
    /// The layout does not exist.
    #[error("model {model}: {cause}")]
    Layout {
        /// The model.
        model: String,
        /// Why.
        cause: LayoutError,
    },
}

/// The names of the presets.
const PRESETS: [&str; 3] = ["tiny", "qwen-0.5b", "llama-8b"];

impl ModelSpec {
    /// A preset: `tiny` (for tests: 1 KiB a token), `qwen-0.5b` (12 KiB a token) or `llama-8b`
    /// (128 KiB a token), with weights of as many bytes as those models have in 16 bits.
    pub fn preset(name: &str) -> Option<ModelSpec> {
        let (layers, kv_heads, head_dim, max_tokens, weights_bytes) = match name {
            "tiny" => (2, 2, 64, 16 << 10, 4 << 20),
            "qwen-0.5b" => (24, 2, 64, 32 << 10, 1 << 30),
            "llama-8b" => (32, 8, 128, 128 << 10, 16 << 30),
            _ => return None,
        };
        Some(ModelSpec {
            name: name.to_owned(),
            layers,
            kv_heads,
            head_dim,
            element_bits: 16,
            max_tokens,
            weights_bytes,
            block_tokens: 16,
        })
    }

    /// What `--model` says: a preset, a preset under another name (`name=preset`), or a JSON file
    /// with the fields of this type.
    ///
    /// # Errors
    /// None of these; a file that cannot be read or says something else; fields out of range.
    pub fn parse(text: &str) -> Result<ModelSpec, ModelError> {
        let (name, source) = match text.split_once('=') {
            Some((name, source)) => (Some(name), source),
            None => (None, text),
        };
        let mut spec = match ModelSpec::preset(source) {
            Some(spec) => spec,
            None if Path::new(source).exists() => ModelSpec::read(source)?,
            None => return Err(ModelError::Unknown(source.to_owned())),
        };
        if let Some(name) = name {
            name.clone_into(&mut spec.name);
        }
        spec.check()?;
        Ok(spec)
    }

    fn read(path: &str) -> Result<ModelSpec, ModelError> {
        let text = std::fs::read_to_string(path)
            .map_err(|cause| ModelError::File { path: path.to_owned(), cause })?;
        serde_json::from_str(&text)
            .map_err(|cause| ModelError::Text { path: path.to_owned(), cause })
    }

    fn check(&self) -> Result<(), ModelError> {
        let field = |field, value, expected| ModelError::Field {
            model: self.name.clone(),
            field,
            value,
            expected,
        };
        if self.name.is_empty() || self.name.contains(char::is_control) {
            return Err(ModelError::Name(self.name.clone()));
        }
        if self.max_tokens < 2 {
            let expected = "at least 2: one to ask, one to answer";
            return Err(field("max_tokens", u64::from(self.max_tokens), expected));
        }
        if self.block_tokens == 0 {
            return Err(field("block_tokens", 0, "at least 1"));
        }
        if self.weights_bytes == 0 {
            return Err(field("weights_bytes", 0, "at least 1"));
        }
        self.pattern().map(drop)
    }

    /// What a token takes.
    ///
    /// # Errors
    /// [`ModelError::Layout`]; [`ModelError::Field`] for the bits of an element.
    pub fn shape(&self) -> Result<KvShape, ModelError> {
        let dtype = match self.element_bits {
            8 => Dtype::Int8,
            16 => Dtype::Bf16,
            32 => Dtype::F32,
            bits => {
                return Err(ModelError::Field {
                    model: self.name.clone(),
                    field: "element_bits",
                    value: u64::from(bits),
                    expected: "8, 16 or 32",
                });
            }
        };
        KvShape::new(self.layers, self.kv_heads, self.head_dim, dtype)
            .map_err(|cause| ModelError::Layout { model: self.name.clone(), cause })
    }

    /// What is written for its tokens.
    ///
    /// # Errors
    /// As [`ModelSpec::shape`]; [`ModelError::Field`] if a head is no multiple of 32 bits.
    pub fn pattern(&self) -> Result<Pattern, ModelError> {
        Pattern::new(&self.shape()?, self.kv_heads).ok_or_else(|| ModelError::Field {
            model: self.name.clone(),
            field: "head_dim",
            value: u64::from(self.head_dim),
            expected: "heads that are a multiple of 4 bytes, and less than 2^32 words a token",
        })
    }
}

/// A token as text: always printable.
pub fn text_of(id: u32) -> char {
    // 32..=126.
    char::from((32 + id % 95) as u8)
}

/// The tokens of a text: its bytes.
pub fn tokens_of(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_sizes_they_say() {
        let bytes = |name| {
            let spec = ModelSpec::parse(name).unwrap();
            spec.shape().unwrap().token_bytes()
        };
        assert_eq!(bytes("tiny"), 1 << 10);
        assert_eq!(bytes("qwen-0.5b"), 12 << 10);
        assert_eq!(bytes("llama-8b"), 128 << 10);
        assert_eq!(ModelSpec::parse("a=tiny").unwrap().name, "a");
    }

    #[test]
    fn what_is_no_model_is_refused_in_words() {
        let error = ModelSpec::parse("gpt").unwrap_err().to_string();
        assert_eq!(
            error,
            r#"model "gpt": expected one of tiny, qwen-0.5b, llama-8b, or a JSON file"#
        );
        let mut spec = ModelSpec::preset("tiny").unwrap();
        spec.element_bits = 12;
        assert_eq!(
            spec.check().unwrap_err().to_string(),
            "model tiny: element_bits = 12: expected 8, 16 or 32"
        );
        let mut spec = ModelSpec::preset("tiny").unwrap();
        spec.head_dim = 1;
        assert!(spec.check().unwrap_err().to_string().contains("multiple of 4 bytes"));
        assert!(matches!(ModelSpec::parse("=tiny"), Err(ModelError::Name(_))));
        spec.name = "a\0b".to_owned();
        let error = spec.check().unwrap_err().to_string();
        assert!(error.contains(r#"a model called "a\0b""#), "{error}");
    }

    #[test]
    fn a_model_comes_from_a_file_too() {
        let mut spec = ModelSpec::preset("tiny").unwrap();
        spec.name = "filed".to_owned();
        let path = std::env::temp_dir().join(format!("vmm-model-{}.json", std::process::id()));
        std::fs::write(&path, serde_json::to_string(&spec).unwrap()).unwrap();
        let read = ModelSpec::parse(path.to_str().unwrap());
        std::fs::write(&path, "{\"name\": 3}").unwrap();
        let error = ModelSpec::parse(path.to_str().unwrap()).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read.unwrap(), spec);
        assert!(matches!(error, ModelError::Text { .. }), "{error}");
    }

    #[test]
    fn text_is_printable_and_bytes_are_tokens() {
        assert!((0..VOCABULARY).map(text_of).all(|c| c.is_ascii() && !c.is_ascii_control()));
        assert_eq!(tokens_of("hi"), [104, 105]);
    }
}
