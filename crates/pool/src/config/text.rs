//! Settings as people write them, on a command line or in a variable.
//!
//! Each function gives the value, or a text that says what would have been accepted.

use super::{ChunkSize, DebugMode, Placement};

/// A growth chunk: `auto`, or a size as [`bytes`] takes it.
///
/// # Errors
/// What would have been accepted.
pub fn chunk(text: &str) -> Result<ChunkSize, String> {
    if text == "auto" {
        return Ok(ChunkSize::Auto);
    }
    bytes(text).map(ChunkSize::Fixed).map_err(|error| format!("{error}, or `auto`"))
}

/// A placement: `first-fit` or `buddy`.
///
/// # Errors
/// What would have been accepted.
pub fn placement(text: &str) -> Result<Placement, String> {
    [Placement::FirstFit, Placement::Buddy]
        .into_iter()
        .find(|placement| placement_name(*placement) == text)
        .ok_or_else(|| format!("expected `first-fit` or `buddy`, found `{text}`"))
}

/// The name that [`placement`] takes.
pub fn placement_name(placement: Placement) -> &'static str {
    match placement {
        Placement::FirstFit => "first-fit",
        Placement::Buddy => "buddy",
    }
}

/// A soft limit: a fraction such as `0.01`, or `off`, which is `None`.
///
/// # Errors
/// What would have been accepted.
pub fn soft_limit(text: &str) -> Result<Option<f64>, String> {
    if text == "off" {
        return Ok(None);
    }
    match text.parse::<f64>() {
        Ok(fraction) if fraction.is_finite() && fraction >= 0.0 => Ok(Some(fraction)),
        _ => Err(format!(
            "expected a fraction of at least 0, such as 0.01, or `off`, found `{text}`"
        )),
    }
}

/// A size as [`bytes`] takes it, or `off`, which is `None`.
///
/// # Errors
/// What would have been accepted.
pub fn bytes_or_off(text: &str) -> Result<Option<u64>, String> {
    if text == "off" {
        return Ok(None);
    }
    bytes(text).map(Some).map_err(|error| format!("{error}, or `off`"))
}

/// A time: a whole number of milliseconds, or `off`, which is `None`.
///
/// # Errors
/// What would have been accepted.
pub fn ms_or_off(text: &str) -> Result<Option<u64>, String> {
    if text == "off" {
        return Ok(None);
    }
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = if plain { text.parse().ok() } else { None };
    parsed
        .map(Some)
        .ok_or_else(|| format!("expected a whole number of milliseconds, or `off`, found `{text}`"))
}

/// A debug mode: `off` or `guard`.
///
/// # Errors
/// What would have been accepted.
pub fn debug_mode(text: &str) -> Result<DebugMode, String> {
    [DebugMode::Off, DebugMode::Guard]
        .into_iter()
        .find(|mode| debug_mode_name(*mode) == text)
        .ok_or_else(|| format!("expected `off` or `guard`, found `{text}`"))
}

/// The name that [`debug_mode`] takes.
pub fn debug_mode_name(mode: DebugMode) -> &'static str {
    match mode {
        DebugMode::Off => "off",
        DebugMode::Guard => "guard",
    }
}

/// A switch: `1` or `0`.
///
/// # Errors
/// What would have been accepted.
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" => Ok(true),
        "0" => Ok(false),
        _ => Err(format!("expected `1` or `0`, found `{text}`")),
    }
}

/// A number of bytes with an optional binary unit: `2097152`, `2MiB`, `32M`, `1g`.
///
/// `MB` and fractions are refused: what they stand for is not the same to everybody.
///
/// # Errors
/// What would have been accepted.
pub fn bytes(text: &str) -> Result<u64, String> {
    let expected = || {
        format!(
            "expected a number of bytes, or one with a unit K, M, G (or KiB, MiB, GiB: powers of \
             1024), found `{text}`"
        )
    };
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| expected())?;
    let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err(expected()),
    };
    number.checked_mul(1 << shift).ok_or_else(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary_and_case_does_not_matter() {
        for (text, bytes) in [
            ("0", 0),
            ("2097152", 2 << 20),
            ("2097152B", 2 << 20),
            ("64k", 64 << 10),
            ("2MiB", 2 << 20),
            ("32M", 32 << 20),
            ("32 mib", 32 << 20),
            ("1g", 1 << 30),
            ("16GiB", 16 << 30),
        ] {
            assert_eq!(super::bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_what_would_be() {
        for text in
            ["", "M", "-2M", "+2M", "2.5M", "2MB", "2 x", "18446744073709551616", "99999999999g"]
        {
            let error = bytes(text).expect_err(text);
            assert!(error.contains("KiB, MiB, GiB") && error.contains(text), "{error}");
        }
    }

    #[test]
    fn the_other_settings_are_words_or_numbers() {
        assert_eq!(chunk("auto"), Ok(ChunkSize::Auto));
        assert_eq!(chunk("32M"), Ok(ChunkSize::Fixed(32 << 20)));
        assert!(chunk("Auto").unwrap_err().ends_with("or `auto`"));
        assert_eq!(soft_limit("off"), Ok(None));
        assert_eq!(soft_limit("0.25"), Ok(Some(0.25)));
        for text in ["", "-1", "NaN", "inf", "1%", "none"] {
            assert!(soft_limit(text).unwrap_err().contains("or `off`"), "{text}");
        }
        assert_eq!((bytes_or_off("off"), bytes_or_off("1k")), (Ok(None), Ok(Some(1024))));
        assert!(bytes_or_off("none").unwrap_err().ends_with("or `off`"));
        assert_eq!((ms_or_off("off"), ms_or_off("10000")), (Ok(None), Ok(Some(10_000))));
        for text in ["", "-1", "+1", "1.5", "10s", "18446744073709551616"] {
            assert!(ms_or_off(text).unwrap_err().contains("milliseconds, or `off`"), "{text}");
        }
        assert_eq!((switch("0"), switch("1")), (Ok(false), Ok(true)));
        assert_eq!(switch("yes"), Err("expected `1` or `0`, found `yes`".into()));
        for value in [Placement::FirstFit, Placement::Buddy] {
            assert_eq!(placement(placement_name(value)), Ok(value));
        }
        for mode in [DebugMode::Off, DebugMode::Guard] {
            assert_eq!(debug_mode(debug_mode_name(mode)), Ok(mode));
        }
        assert!(debug_mode("on").unwrap_err().contains("`off` or `guard`"));
        assert!(placement("best-fit").unwrap_err().contains("`first-fit` or `buddy`"));
    }
}
