//! Sizes as people write them: `2097152`, `2MiB`, `32M`, `1g`.

/// Reads a number of bytes with an optional binary unit.
///
/// # Errors
/// What would have been accepted.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
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
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_what_would_be() {
        for text in
            ["", "M", "-2M", "+2M", "2.5M", "2MB", "2 x", "18446744073709551616", "99999999999g"]
        {
            let error = parse_bytes(text).expect_err(text);
            assert!(error.contains("KiB, MiB, GiB") && error.contains(text), "{error}");
        }
    }
}
