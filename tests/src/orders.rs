//! Every order of some things.

/// Every order of `count` things, by their numbers.
pub fn orders(count: usize) -> Vec<Vec<usize>> {
    (0..count).fold(vec![vec![]], |orders, next| {
        let longer = |order: &Vec<usize>, at| {
            let mut order = order.clone();
            order.insert(at, next);
            order
        };
        orders.iter().flat_map(|order| (0..=next).map(|at| longer(order, at))).collect()
    })
}
