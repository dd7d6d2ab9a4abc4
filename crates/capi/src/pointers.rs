//! What C passes by pointer: places for answers, and text.

use std::ffi::c_char;

use crate::failure::Failure;

/// The longest text that is taken, without its end.
const TEXT_BYTES_MAX: usize = 255;

/// Writes an answer, if there is a place for it.
///
/// # Safety
/// NULL, or writable.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: writable by this function's own condition, aligned or not.
        unsafe { out.write_unaligned(value) }
    }
}

/// A place for an answer without which a call has no sense.
pub(crate) fn required<T>(out: *mut T, name: &'static str) -> Result<(), Failure> {
    match out.is_null() {
        true => Err(Failure::argument(name, "NULL", "a place for the answer")),
        false => Ok(()),
    }
}

/// A text of the caller's; `None` for NULL.
///
/// # Safety
/// NULL, or readable up to the first 0, at most 256 bytes.
pub(crate) unsafe fn text(
    from: *const c_char,
    name: &'static str,
) -> Result<Option<String>, Failure> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: the 0 before is not passed, so the byte is readable by this function's own condition.
    let byte = |at| unsafe { from.cast::<u8>().add(at).read() };
    let bytes: Vec<u8> = (0..=TEXT_BYTES_MAX).map(byte).take_while(|byte| *byte != 0).collect();
    if bytes.len() > TEXT_BYTES_MAX {
        let value = String::from_utf8_lossy(&bytes[..16]).into_owned() + "…";
        return Err(Failure::argument(name, value, format!("at most {TEXT_BYTES_MAX} bytes")));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| {
        let value = error.as_bytes().escape_ascii().to_string();
        Failure::argument(
            name,
            value,
            format!("UTF-8, which it is not from byte {} on", error.utf8_error().valid_up_to()),
        )
    })
}

/// Gives a text in the manner of `snprintf`: as much as fits, always with a 0 behind it, and its whole
/// length. A capacity of 0 only asks for that.
///
/// # Safety
/// `buffer` has `capacity` writable bytes; `needed` is NULL or writable.
pub(crate) unsafe fn give_text(
    text: &str,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> Result<(), Failure> {
    // SAFETY: the caller's own condition.
    unsafe { put(needed, text.len()) };
    if capacity == 0 {
        return Ok(());
    }
    required(buffer, "buffer")?;
    let mut cut = text.len().min(capacity - 1);
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    // SAFETY: `cut` is less than `capacity`, and a text of our own lies elsewhere.
    unsafe {
        buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), cut);
        buffer.cast::<u8>().add(cut).write(0);
    }
    match cut == text.len() {
        true => Ok(()),
        false => Err(Failure::Truncated { needed: text.len(), capacity }),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, CString};

    use super::*;

    #[test]
    fn text_is_cut_between_characters_and_always_ended() {
        let give = |capacity: usize| {
            let (mut buffer, mut needed) = ([1_u8; 8], 0);
            // SAFETY: at most the 8 bytes of the buffer.
            let answer =
                unsafe { give_text("aé", buffer.as_mut_ptr().cast(), capacity, &raw mut needed) };
            assert_eq!(needed, 3);
            (answer.is_ok(), buffer[..4].to_vec())
        };
        assert_eq!(give(0), (true, vec![1; 4]));
        assert_eq!(give(1), (false, vec![0, 1, 1, 1]));
        assert_eq!(give(2), (false, vec![b'a', 0, 1, 1]));
        assert_eq!(give(3), (false, vec![b'a', 0, 1, 1]));
        assert_eq!(give(4), (true, b"a\xc3\xa9\0".to_vec()));
        // SAFETY: no bytes are written.
        let answer = unsafe { give_text("a", std::ptr::null_mut(), 5, std::ptr::null_mut()) };
        assert!(answer.unwrap_err().to_string().starts_with("buffer = NULL"));
    }

    #[test]
    fn text_is_taken_if_it_is_short_and_utf_8() {
        let take = |words: &CStr| {
            // SAFETY: a C string.
            unsafe { text(words.as_ptr(), "tag") }.map_err(|failure| failure.to_string())
        };
        let long = |bytes| CString::new("x".repeat(bytes)).unwrap();
        assert_eq!(take(c"kv"), Ok(Some("kv".to_owned())));
        assert_eq!(take(&long(255)), Ok(Some("x".repeat(255))));
        assert!(take(&long(256)).unwrap_err().contains("at most 255 bytes"));
        assert!(take(c"a\xff").unwrap_err().contains("tag = a\\xff: expected UTF-8"));
        // SAFETY: NULL.
        assert!(unsafe { text(std::ptr::null(), "tag") }.unwrap().is_none());
    }
}
