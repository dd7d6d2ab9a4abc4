//! Makes a failing list shorter, by leaving things out (delta debugging).

/// The shortest list found, by leaving out ever smaller parts of `items`, for which `fails` still
/// says yes. `fails(items)` must hold at the start.
pub fn shrink<T: Clone>(items: &[T], mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut kept = items.to_vec();
    let mut part = kept.len().div_ceil(2).max(1);
    loop {
        let mut start = 0;
        let mut shorter = false;
        while start < kept.len() {
            let end = (start + part).min(kept.len());
            let mut candidate = kept[..start].to_vec();
            candidate.extend_from_slice(&kept[end..]);
            if fails(&candidate) {
                kept = candidate;
                shorter = true;
            } else {
                start = end;
            }
        }
        if part == 1 && !shorter {
            return kept;
        }
        part = (part / 2).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_matter_is_left_out() {
        let items: Vec<u32> = (0..100).collect();
        let needed = |items: &[u32]| [7, 8, 55].iter().all(|n| items.contains(n));
        assert_eq!(shrink(&items, needed), [7, 8, 55]);
        assert_eq!(shrink(&items, |items| items.len() >= 3).len(), 3);
        assert_eq!(shrink(&items, |_| true), []);
    }
}
