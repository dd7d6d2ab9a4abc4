//! The structs of the header. Each begins with its own length, so that programs and libraries of
//! different versions understand each other.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use crate::failure::Failure;

/// A caller that means to pass a struct has no reason to claim more than this.
const STRUCT_BYTES_MAX: usize = 4096;

/// The VMM_POOL_ variables of the environment count, in place of what the options say.
pub const VMM_POOL_USE_ENVIRONMENT: u32 = 1;
/// Chunks of elastic buffers can be exported to other processes.
pub const VMM_POOL_EXPORTABLE: u32 = 2;
/// No thread of the pool's own: its work is done by requests when they come.
pub const VMM_POOL_NO_BACKGROUND: u32 = 4;
/// Guard mode: stray writes of kernels fault. Slow.
pub const VMM_POOL_GUARD: u32 = 8;

/// How a pool is made. Set all of it to 0, then struct_bytes to sizeof, then what differs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VmmPoolOptions {
    /// sizeof(vmm_pool_options).
    pub struct_bytes: u32,
    /// VMM_POOL_USE_ENVIRONMENT, VMM_POOL_EXPORTABLE, VMM_POOL_NO_BACKGROUND, VMM_POOL_GUARD; or 0.
    pub flags: u32,
    /// The ordinals of its devices, or NULL for all of the machine's.
    pub devices: *const i32,
    /// How many there are in devices.
    pub device_count: u64,
    /// The length of chunks that streams' memory grows by: a power of two from the driver's granularity
    /// (2 MiB) to 16 GiB; 0 lets the pool choose.
    pub chunk_bytes: u64,
    /// The most physical memory that it owns on each device; 0 is no limit.
    pub limit_bytes: u64,
    /// Chunks are made ahead of need until so much of each device lies ready.
    pub stock_low_bytes: u64,
    /// Chunks that come back while so much lies ready go back to the driver; 0 is no such mark.
    pub stock_high_bytes: u64,
    /// What elastic buffers may have of the host's memory, for vmm_pool_sleep and vmm_elastic_migrate;
    /// 0 is none.
    pub host_bytes: u64,
    /// Which NUMA node of the host gives it.
    pub host_node: u32,
    /// 0.
    pub reserved: u32,
}

/// What is known of a block.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VmmPoolBlockInfo {
    /// sizeof(vmm_pool_block_info), set before the call.
    pub struct_bytes: u32,
    /// The device whose memory it is.
    pub device: i32,
    /// Its first address.
    pub address: u64,
    /// Its length: what was asked for, rounded up to 512.
    pub bytes: u64,
}

/// The buffer is moved by the pool to make room, while nobody uses it.
pub const VMM_ELASTIC_MOVABLE: u32 = 1;
/// Its chunks can be exported to other processes, whatever the pool's options say.
pub const VMM_ELASTIC_EXPORTABLE: u32 = 2;
/// All of the capacity is one physical piece.
pub const VMM_ELASTIC_SINGLE_PIECE: u32 = 4;

/// How an elastic buffer is made. Set all of it to 0, then struct_bytes to sizeof, then what differs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VmmElasticOptions {
    /// sizeof(vmm_elastic_options).
    pub struct_bytes: u32,
    /// Its home: a device of the pool.
    pub device: i32,
    /// The addresses to reserve, which cost no memory; 0 are as many as the device has memory.
    pub capacity_bytes: u64,
    /// The length of its chunks, a multiple of the driver's granularity; 0 lets the pool choose.
    pub chunk_bytes: u64,
    /// A name in UTF-8, of at most 255 bytes, for statistics and vmm_pool_sleep; or NULL.
    pub tag: *const c_char,
    /// What may be committed at most; 0 is no limit but the capacity.
    pub quota_bytes: u64,
    /// VMM_ELASTIC_MOVABLE, VMM_ELASTIC_EXPORTABLE, VMM_ELASTIC_SINGLE_PIECE; or 0.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

/// What is known of an elastic buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VmmElasticState {
    /// sizeof(vmm_elastic_state), set before the call.
    pub struct_bytes: u32,
    /// Its home, which a migration changes.
    pub device: i32,
    /// Its address, which never changes.
    pub address: u64,
    /// What can be committed.
    pub capacity_bytes: u64,
    /// Its addresses with memory behind them.
    pub committed_bytes: u64,
    /// The length of its chunks.
    pub chunk_bytes: u64,
    /// Counts the changes of the memory behind the addresses.
    pub generation: u64,
    /// Uses that have begun and not ended.
    pub open_uses: u64,
    /// Of the committed bytes, those that lie on devices.
    pub device_bytes: u64,
    /// Of the committed bytes, those that lie in the host's memory.
    pub host_bytes: u64,
    /// 0 awake; 1 asleep, its contents kept; 2 asleep, its contents lost.
    pub asleep: i32,
    /// 0.
    pub reserved: u32,
}

/// A struct that begins with its length.
///
/// # Safety
/// Its first field is `struct_bytes`; it has no padding; every bit pattern is a value.
pub(crate) unsafe trait Versioned: Copy {
    /// Its name in the header.
    const NAME: &'static str;
}

// SAFETY: integers and pointers without gaps; `layouts_are_those_of_version_1` looks at that.
unsafe impl Versioned for VmmPoolOptions {
    const NAME: &'static str = "vmm_pool_options";
}
// SAFETY: as above.
unsafe impl Versioned for VmmPoolBlockInfo {
    const NAME: &'static str = "vmm_pool_block_info";
}
// SAFETY: as above.
unsafe impl Versioned for VmmElasticOptions {
    const NAME: &'static str = "vmm_elastic_options";
}
// SAFETY: as above.
unsafe impl Versioned for VmmElasticState {
    const NAME: &'static str = "vmm_elastic_state";
}

/// The length that a caller's struct says it has.
///
/// # Safety
/// NULL, or four readable bytes.
unsafe fn told_bytes<T: Versioned>(from: *const T) -> Result<usize, Failure> {
    if from.is_null() {
        return Err(Failure::argument(T::NAME, "NULL", "a struct"));
    }
    // SAFETY: readable by this function's own condition.
    let told = unsafe { from.cast::<u32>().read_unaligned() } as usize;
    if !(8..=STRUCT_BYTES_MAX).contains(&told) || !told.is_multiple_of(8) {
        let expected = format!("sizeof({}), {} in this version", T::NAME, size_of::<T>());
        return Err(Failure::argument("struct_bytes", told, expected));
    }
    Ok(told)
}

/// A caller's struct: of an earlier version, whose missing fields are 0, or of a later one whose new
/// fields are.
///
/// # Safety
/// NULL, or four readable bytes, and as many as they say.
pub(crate) unsafe fn read<T: Versioned>(from: *const T) -> Result<T, Failure> {
    // SAFETY: the caller's own condition.
    let told = unsafe { told_bytes(from)? };
    let known = told.min(size_of::<T>());
    let bytes = from.cast::<u8>();
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `told` bytes are readable by this function's own condition, and `value` is as long as
    // `known` at least; every bit pattern is a `T`.
    let (value, tail) = unsafe {
        bytes.copy_to_nonoverlapping(value.as_mut_ptr().cast::<u8>(), known);
        (value.assume_init(), std::slice::from_raw_parts(bytes.add(known), told - known))
    };
    if tail.iter().any(|byte| *byte != 0) {
        let expected = format!(
            "{} is of a later version: the fields behind the {known} bytes of this one to be 0",
            T::NAME
        );
        return Err(Failure::argument("struct_bytes", told, expected));
    }
    Ok(value)
}

/// Where an answer goes, of the version that the caller knows.
#[derive(Debug)]
pub(crate) struct Answer<T> {
    to: *mut T,
    told: usize,
}

impl<T: Versioned> Answer<T> {
    /// Looks at the caller's struct, before anything is done.
    ///
    /// # Safety
    /// NULL, or four readable bytes, and as many writable ones as they say until [`Answer::give`].
    pub(crate) unsafe fn to(to: *mut T) -> Result<Answer<T>, Failure> {
        // SAFETY: the caller's own condition.
        let told = unsafe { told_bytes(to)? };
        Ok(Answer { to, told })
    }

    /// Writes the fields that the caller knows, and 0 to those that only the caller knows.
    pub(crate) fn give(self, value: &T) {
        let known = self.told.min(size_of::<T>());
        let bytes = self.to.cast::<u8>();
        // SAFETY: `told` bytes are writable by the condition of `Answer::to`; `value` is another
        // object, and has `known` bytes without padding.
        unsafe {
            bytes.copy_from_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), known);
            bytes.add(known).write_bytes(0, self.told - known);
            self.to.cast::<u32>().write_unaligned(self.told as u32);
        }
    }
}

/// Refuses flags that this version does not know, and a reserved field that is set.
pub(crate) fn check_flags(flags: u32, known: u32, reserved: u32) -> Result<(), Failure> {
    if flags & !known != 0 {
        let expected = format!("none but {known:#x}");
        return Err(Failure::argument("flags", format!("{flags:#x}"), expected));
    }
    match reserved {
        0 => Ok(()),
        value => Err(Failure::argument("reserved", value, "0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first version's lengths stay what they are: later fields come behind.
    #[test]
    fn layouts_are_those_of_version_1() {
        assert_eq!(size_of::<VmmPoolOptions>(), 4 + 4 + 8 + 6 * 8 + 4 + 4);
        assert_eq!(size_of::<VmmPoolBlockInfo>(), 4 + 4 + 2 * 8);
        assert_eq!(size_of::<VmmElasticOptions>(), 4 + 4 + 2 * 8 + 8 + 8 + 4 + 4);
        assert_eq!(size_of::<VmmElasticState>(), 4 + 4 + 8 * 8 + 4 + 4);
    }

    #[test]
    fn earlier_and_later_structs_are_understood() {
        // As the C side has it: eight words, the first of which holds the length and the device.
        let mut words = [0_u64; 8];
        let value = VmmPoolBlockInfo { struct_bytes: 0, device: 3, address: 5, bytes: 7 };
        for (told, expected) in
            [(16_u32, [5, u64::MAX, u64::MAX]), (24, [5, 7, u64::MAX]), (32, [5, 7, 0])]
        {
            words = [u64::MAX; 8];
            words[0] = u64::from(told);
            // SAFETY: 64 bytes that live.
            let answer = unsafe { Answer::to(words.as_mut_ptr().cast::<VmmPoolBlockInfo>()) };
            answer.unwrap().give(&value);
            assert_eq!(words[1..4], expected, "{told}");
            assert_eq!(words[0], u64::from(told) | 3 << 32);
        }
        for (told, tail, is_good) in
            [(24_u32, 9, true), (32, 0, true), (32, 9, false), (8, 9, true)]
        {
            words = [1, 2, 3, tail, 0, 0, 0, 0];
            words[0] = u64::from(told);
            // SAFETY: as above.
            let read = unsafe { read::<VmmPoolBlockInfo>(words.as_ptr().cast()) };
            assert_eq!(read.is_ok(), is_good, "{told}");
            let address = if told == 8 { 0 } else { 2 };
            assert!(read.is_ok_and(|it| it.address == address) == is_good);
        }
        for told in [0, 4, 7, 12, 4104, u32::MAX] {
            words[0] = u64::from(told);
            // SAFETY: as above.
            let failure = unsafe { read::<VmmPoolBlockInfo>(words.as_ptr().cast()) }.unwrap_err();
            assert!(failure.to_string().contains("sizeof(vmm_pool_block_info), 24"), "{failure}");
        }
    }
}
