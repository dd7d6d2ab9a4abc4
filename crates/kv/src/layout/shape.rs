//! [`KvShape`]: what one token takes.

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// 32 bits, IEEE.
    F32,
    /// 16 bits, IEEE.
    F16,
    /// 16 bits, bfloat.
    Bf16,
    /// 8 bits, floating point of either kind.
    Fp8,
    /// 8 bits, integer.
    Int8,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::Fp8 | Dtype::Int8 => 1,
        }
    }
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Keys, which come first.
    Key,
    /// Values.
    Value,
}

impl Part {
    /// 0 or 1.
    pub const fn index(self) -> u64 {
        match self {
            Part::Key => 0,
            Part::Value => 1,
        }
    }
}

/// Why a layout does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A count is 0.
    #[error("{what} = 0: expected at least 1")]
    Zero {
        /// Of what.
        what: &'static str,
    },
    /// The heads cannot be split so.
    #[error(
        "{kv_heads} heads cannot be split over {shards} devices: expected a divisor or a multiple \
         of the number of heads"
    )]
    Split {
        /// Heads for keys and values.
        kv_heads: u32,
        /// Devices.
        shards: u32,
    },
    /// There is no such shard.
    #[error("shard {index} of {shards}: expected an index below {shards}")]
    NoShard {
        /// Asked for.
        index: u32,
        /// How many there are.
        shards: u32,
    },
    /// It is longer than 2^63 bytes.
    #[error("{what} would be longer than 2^63 bytes")]
    TooLarge {
        /// What.
        what: &'static str,
    },
}

/// What one token takes in a cache: layers, heads, head size, type. Of one device, if the heads are
/// split over several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    dtype: Dtype,
    first_head: u32,
}

impl KvShape {
    /// A model's shape: `kv_heads` heads for keys and values (fewer than for queries where those are
    /// grouped), `head_dim` elements each.
    ///
    /// # Errors
    /// A count of 0; a token of more than 2^63 bytes.
    pub fn new(
        layers: u32,
        kv_heads: u32,
        head_dim: u32,
        dtype: Dtype,
    ) -> Result<KvShape, LayoutError> {
        for (count, what) in [(layers, "layers"), (kv_heads, "kv_heads"), (head_dim, "head_dim")] {
            if count == 0 {
                return Err(LayoutError::Zero { what });
            }
        }
        let shape = KvShape { layers, kv_heads, head_dim, dtype, first_head: 0 };
        let row_bytes = u64::from(kv_heads) * u64::from(head_dim); // below 2^64
        let row_bytes = row_bytes.checked_mul(dtype.bytes());
        let token_bytes = row_bytes.and_then(|row| row.checked_mul(2 * u64::from(layers)));
        within(token_bytes, "a token")?;
        Ok(shape)
    }

    /// The part of device `index` when the heads are split over `shards` devices: each has
    /// `kv_heads / shards` of them. With more devices than heads, `shards / kv_heads` devices each
    /// have a copy of the same head.
    ///
    /// # Errors
    /// `shards` neither divides the number of heads nor is a multiple of it; no such index.
    pub fn shard(self, index: u32, shards: u32) -> Result<KvShape, LayoutError> {
        if shards == 0 {
            return Err(LayoutError::Zero { what: "shards" });
        }
        if index >= shards {
            return Err(LayoutError::NoShard { index, shards });
        }
        let heads = self.kv_heads;
        let (first, kv_heads) = if heads.is_multiple_of(shards) {
            let each = heads / shards;
            (index * each, each)
        } else if shards.is_multiple_of(heads) {
            (index / (shards / heads), 1)
        } else {
            return Err(LayoutError::Split { kv_heads: heads, shards });
        };
        Ok(KvShape { kv_heads, first_head: self.first_head + first, ..self })
    }

    /// Layers.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Heads for keys and values, on this device.
    pub fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Which of the model's heads is the first on this device.
    pub fn first_head(&self) -> u32 {
        self.first_head
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// The type of an element.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes of one head of one token.
    pub fn head_bytes(&self) -> u64 {
        u64::from(self.head_dim) * self.dtype.bytes()
    }

    /// Bytes of one token's keys, or values, in one layer.
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.kv_heads) * self.head_bytes()
    }

    /// Bytes of one token, keys and values of all layers.
    pub fn token_bytes(&self) -> u64 {
        self.row_bytes() * 2 * u64::from(self.layers)
    }

    /// How many whole tokens fit in so many bytes.
    pub fn tokens_in(&self, bytes: u64) -> u64 {
        bytes / self.token_bytes()
    }
}

/// Lengths stay below 2^63, so that the sum of two is no overflow.
pub(super) fn within(bytes: Option<u64>, what: &'static str) -> Result<u64, LayoutError> {
    bytes.filter(|bytes| *bytes <= 1 << 63).ok_or(LayoutError::TooLarge { what })
}
