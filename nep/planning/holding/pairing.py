"""Pairs slots for mirroring: whom does each slot trust with a copy of its state?

Two slots that die together lose state only if one of them mirrors the other. With mirrors scattered over all
slots any two do; with *copysets* (Cidon et al., "Copysets: Reducing the Frequency of Data Loss in Cloud
Storage", USENIX ATC 2013), here mutual pairs, n/2 of the n(n-1)/2 pairs of slots do. Fewer is impossible, since
every slot needs a partner. Each slot also serves one other slot, so nobody keeps more than twice what the
largest owner owns.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class _Chain(NamedTuple):
    """Slots each mirrored on the next one: nobody is mirrored on the head, and the tail has no partner.

    A single slot is both.
    """

    head: int
    tail: int


def pair_up(
    domains: Mapping[int, int], owned: Mapping[int, int], kept: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Gives each owner a partner in another fault domain, no two owners the same one.

    Pairs that are kept are opened only if an owner finds no partner otherwise, one for two such owners. From
    scratch the pairs are mutual, with one ring of three if the slots are odd in number, and whole domains
    pair up where sizes allow: then two nodes that die together lose state only if they are such a pair.

    Args:
        domains: slot -> fault domain, of every slot that may own or mirror.
        owned: slot -> size of what it owns; a slot that owns nothing needs no partner, but may be one.
        kept: owner -> its partner so far; one-to-one, in another domain.

    Returns:
        Owner -> partner. Every owner has one unless a single domain has more than half of the slots; then
        some owners of that domain are left out, and every slot of another domain serves one of it.
    """
    rings = _Rings(domains, owned, kept or {})
    pairs, left = _across_domains(rings.open_chains(), domains, owned)
    for one, other in pairs:
        rings.join(one, other)
    rings.squeeze_in([chain for chain in left if owned[chain.tail]])
    return {owner: rings.partner[owner] for owner in sorted(rings.partner) if owned[owner]}


class _Rings:
    """Who is mirrored on whom, while it changes. Complete it is a set of rings; a mutual pair is one of two.

    A slot that owns nothing has its place in a ring too; its link stands for no data.
    """

    def __init__(self, domains: Mapping[int, int], owned: Mapping[int, int], kept: Mapping[int, int]) -> None:
        self.domains = domains
        self.owned = owned
        self.partner = dict(kept)
        # Neighbours in this order are of the same domain, so what is opened one after the other is, too.
        self._order = sorted(domains, key=lambda slot: (domains[slot], slot))

    def open_chains(self) -> list[_Chain]:
        """Closes the chains that can close on themselves and returns the others.

        Head and tail of those are of the same domain.
        """
        served = frozenset(self.partner.values())
        chains: list[_Chain] = []
        for head in sorted(self.domains.keys() - served):
            tail = head
            while tail in self.partner:
                tail = self.partner[tail]
            if self.domains[tail] != self.domains[head]:
                self.partner[tail] = head
            else:
                chains.append(_Chain(head, tail))
        return chains

    def join(self, one: _Chain, other: _Chain) -> None:
        """Makes a ring of two chains; of two single slots, a mutual pair."""
        self.partner[one.tail] = other.head
        self.partner[other.tail] = one.head

    def squeeze_in(self, chains: list[_Chain]) -> None:
        """Gives places to chains that found no other to join, by opening rings. All are of one domain.

        Two of them take a mutual pair apart and make two of it; a single one finds a ring of three, which
        becomes two pairs, else it makes one of three. As many find a place as possible: if a chain finds
        none, then no link is left that is outside its domain at both ends.
        """
        waiting = list(chains)
        if not waiting:
            return
        domain = self.domains[waiting[0].head]
        if len(waiting) % 2 and self._split_three(waiting[-1], domain):
            waiting.pop()
        for owner, partner in self._pairs_outside(domain):
            if len(waiting) < 2:
                break
            for end in (owner, partner):
                chain = waiting.pop(0)
                self.partner[chain.tail] = end
                self.partner[end] = chain.head
        for chain in waiting:
            link = self._link_outside(domain)
            if link is None:
                break
            self.partner[chain.tail] = self.partner[link]
            self.partner[link] = chain.head

    def _split_three(self, chain: _Chain, domain: int) -> bool:
        """Takes one slot out of a ring of three for the chain and leaves the other two as a pair."""
        for slot in self._order:
            after = self.partner.get(slot, slot)
            before = self.partner.get(after, slot)
            is_three = before not in (slot, after) and self.partner.get(before) == slot
            if is_three and self.domains[slot] != domain:
                self.partner[before] = after
                self.partner[after] = before
                self.partner[chain.tail] = slot
                self.partner[slot] = chain.head
                return True
        return False

    def _pairs_outside(self, domain: int) -> list[tuple[int, int]]:
        """Mutual pairs with both ends in other domains."""
        pairs: list[tuple[int, int]] = []
        seen: set[int] = set()
        for owner in self._order:
            seen.add(owner)
            partner = self.partner.get(owner, owner)
            if partner in seen or self.partner.get(partner) != owner:
                continue
            if domain not in (self.domains[owner], self.domains[partner]):
                pairs.append((owner, partner))
        return pairs

    def _link_outside(self, domain: int) -> int | None:
        """The owner whose link is best opened for a chain of this domain: without data, else of a long ring."""
        best: tuple[bool, bool] | None = None
        found: int | None = None
        for owner in self._order:
            partner = self.partner.get(owner)
            if partner is None or self.domains[partner] == domain:
                continue
            if self.owned[owner] and self.domains[owner] == domain:
                continue
            # A link of a longer ring costs one pair more, that of a mutual pair two.
            price = (bool(self.owned[owner]), self.partner.get(partner) == owner)
            if best is None or price < best:
                best, found = price, owner
        return found


def _across_domains(
    chains: Iterable[_Chain], domains: Mapping[int, int], owned: Mapping[int, int]
) -> tuple[list[tuple[_Chain, _Chain]], list[_Chain]]:
    """Pairs chains of different domains, as many as possible; the rest is of one domain.

    The large goes with the small where there is a choice.
    """
    by_domain: dict[int, list[_Chain]] = {}
    for chain in chains:
        by_domain.setdefault(domains[chain.head], []).append(chain)
    if not by_domain:
        return [], []
    groups = [
        sorted(by_domain[domain], key=lambda chain: (-owned[chain.tail], chain.head)) for domain in sorted(by_domain)
    ]
    groups.sort(key=len, reverse=True)  # stable: among equals, the domain decides
    total = sum(map(len, groups))
    excess = 2 * len(groups[0]) - total
    if excess > 0:
        left = groups[0][-excess:]
        del groups[0][-excess:]
    elif total % 2:
        # Any group can spare one; a slot that owns nothing misses nothing.
        left = [min(groups, key=lambda group: bool(owned[group[-1].tail])).pop()]
    else:
        left = []
    return _match([group for group in groups if group], owned), left


def _match(groups: list[list[_Chain]], owned: Mapping[int, int]) -> list[tuple[_Chain, _Chain]]:
    """Pairs chains of different groups, all of them; no group has more than half."""
    groups.sort(key=len, reverse=True)
    pairs: list[tuple[_Chain, _Chain]] = []
    while len(groups) >= 2 and len(groups[0]) == len(groups[1]):
        # Two whole groups, if the others can do without them.
        rest = groups[2:]
        if rest and 2 * len(rest[0]) > sum(map(len, rest)):
            break
        pairs += zip(groups[0], _smallest_first(groups[1], owned), strict=True)
        groups = rest
    # Half of all further on is another group, since none has more than half.
    half = sum(map(len, groups)) // 2
    flat: list[_Chain] = []
    for group in groups:
        flat += group if len(flat) < half else _smallest_first(group, owned)
    pairs += zip(flat[:half], flat[half:], strict=True)
    return pairs


def _smallest_first(group: list[_Chain], owned: Mapping[int, int]) -> list[_Chain]:
    return sorted(group, key=lambda chain: (owned[chain.tail], chain.head))
