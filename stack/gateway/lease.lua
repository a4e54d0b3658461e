-- Leases of gateway replicas: the transition of lease_store.py, which tests compare with this script.
-- KEYS[1]: one hash for each fleet. ARGV[1]: a request in msgpack. Returns a reply in msgpack.
-- Field `!`: run, last, calm, epoch. `r:NAME`: one replica. `v:TEAM`: tokens charged to a team at all replicas.
local key, rq = KEYS[1], cmsgpack.unpack(ARGV[1])
local time = redis.call('time')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2] then now = tonumber(ARGV[2]) end  -- tests bring a clock
local floor, min, max, insert = math.floor, math.min, math.max, table.insert

local function replica(fields)  -- of its record: the order of ReplicaLease
  return { incarnation = fields[1], sequence = fields[2], epoch = fields[3], expiry = fields[4], linger = fields[5],
    policy = fields[6], use = fields[7], claims = fields[8], teams = fields[9] }
end

local function packed(r)
  return cmsgpack.pack({ r.incarnation, r.sequence, r.epoch, r.expiry, r.linger, r.policy, r.use, r.claims, r.teams })
end

local meta, replicas, total = { '', -1, 0, 0 }, {}, {}
local stored = redis.call('hgetall', key)
for i = 1, #stored, 2 do
  local field, value = stored[i], stored[i + 1]
  local kind, name = string.sub(field, 1, 2), string.sub(field, 3)
  if field == '!' then meta = cmsgpack.unpack(value)
  elseif kind == 'r:' then replicas[name] = replica(cmsgpack.unpack(value))
  elseif kind == 'v:' then total[name] = tonumber(value) end
end

local stood_still = next(replicas) and (now < meta[2] or now - meta[2] > 500)
if meta[1] ~= rq.run or meta[2] < 0 or stood_still then
  meta[1], meta[3], meta[4] = rq.run, now + rq.ttl_ms, max(meta[4], now)
  for name, each in pairs(replicas) do
    each.expiry = now + rq.ttl_ms
    redis.call('hset', key, 'r:' .. name, packed(each))
  end
end
meta[2] = now
redis.call('hset', key, '!', cmsgpack.pack(meta))
redis.call('pexpire', key, 86400000)

local mine = replicas[rq.name]
if mine and mine.incarnation ~= rq.incarnation then
  if now <= mine.expiry then return cmsgpack.pack({ state = 'taken' }) end
  mine = nil
end
if mine and rq.sequence <= mine.sequence then return cmsgpack.pack({ state = 'late' }) end

-- A held limit is { lease, demand, limit, large, since, rank }, a claim { use, keep, demand, limit, large, rank }, a team
-- { name, rank, band, weight, served, counted, demand, queued, queued_tokens }.
local names, live, is_live, busy, policies = { rq.name }, {}, { [rq.name] = true }, 0, { [rq.policy] = true }
local different, claims, teams = 1, {}, { [rq.name] = rq.teams }
for name, each in pairs(replicas) do
  if name ~= rq.name then
    if now > each.expiry + each.linger then redis.call('hdel', key, 'r:' .. name)
    else
      insert(names, name)
      busy, claims[name], teams[name] = busy + each.use, each.claims, each.teams
      if now <= each.expiry then
        is_live[name] = true
        if not policies[each.policy] then policies[each.policy], different = true, different + 1 end
      end
    end
  end
end
table.sort(names)
for _, name in ipairs(names) do
  if is_live[name] then insert(live, name) end
end
local held = mine and mine.epoch == rq.epoch and now <= mine.expiry
local calm, turn = now < meta[3], floor(now / rq.ttl_ms)
if not held then
  meta[4] = meta[4] + 1
  redis.call('hset', key, '!', cmsgpack.pack(meta))
end
local epoch = held and mine.epoch or meta[4]

local function portion(parts, own)
  local whole, sum, wholes, rest, place = {}, 0.0, 0, 0, nil
  for _, name in ipairs(live) do
    local part = parts[name]
    if part then
      whole[name] = floor(part + 1e-9)
      sum, wholes = sum + part, wholes + whole[name]
      if part - whole[name] > 1e-9 then
        if name == own then place = rest end
        rest = rest + 1
      end
    end
  end
  if not place then return whole[own], 0, sum end
  if (place + turn) % rest < floor(sum + 1e-9) - wholes then return whole[own] + 1, 0, sum end
  return whole[own], min(1, whole[own]), sum
end

local function first_large(at)
  local large, owner, since, rank = 0, nil, 0, 0
  for _, one in ipairs(at) do
    local other = one[2]
    local its = other[6] or 0
    if other[4] ~= 0 and (not owner or its < rank or (its == rank and other[5] < since)) then
      since, owner, large, rank = other[5], one[1], other[4], its
    end
  end
  return large, owner, rank
end

local function demanded_parts(at, limit)
  local wanted, parts = 0, {}
  local large, owner = first_large(at)
  local reserved = min(limit, large)
  local rest = limit - reserved
  for _, one in ipairs(at) do
    if one[1] ~= owner then wanted = wanted + one[2][2] end
  end
  for _, one in ipairs(at) do
    local name, want = one[1], one[2][2]
    if name == owner then parts[name] = reserved
    elseif wanted <= rest then parts[name] = want
    else parts[name] = rest * want / wanted end
  end
  return parts
end

-- Weighted max-min: adds to `due`, and returns what is left. most: up to which a team gets something.
local function max_min(divided, left, names, wanted, due, most)
  local rows, weights = {}, 0.0
  for i, name in ipairs(names) do
    local lacking = (most and most[name] or wanted[name].demand) - due[name]
    rows[i] = { name, lacking, lacking / wanted[name].weight, wanted[name].weight }
  end
  table.sort(rows, function(a, b) return a[3] < b[3] or (a[3] == b[3] and a[1] < b[1]) end)
  for _, row in ipairs(rows) do weights = weights + row[4] end
  for _, row in ipairs(rows) do
    local more = max(0.0, min(row[2], divided * row[4] / weights))
    due[row[1]] = due[row[1]] + more
    divided, left, weights = divided - more, left - more, weights - row[4]
  end
  return left
end

local function least(name, otherwise)
  local found
  for _, each in ipairs(live) do
    local other = claims[each][name]
    if other and (not found or other[3] < found) then found = other[3] end
  end
  return found or otherwise
end

local function due_by_team(left, wanted, order, bounds)
  local due, groups, places, ranks, given = {}, {}, {}, {}, {}
  for _, name in ipairs(order) do
    local each = wanted[name]
    due[name] = 0.0
    groups[each.rank] = groups[each.rank] or {}
    local group = groups[each.rank][each.group]
    if not group then
      if not next(groups[each.rank]) then insert(ranks, each.rank) end
      group = { rank = each.rank, name = each.group, teams = {} }
      groups[each.rank][each.group] = group
      insert(places, group)
    end
    insert(group.teams, name)
  end
  table.sort(ranks)
  table.sort(places, function(a, b) return a.rank < b.rank or (a.rank == b.rank and a.name < b.name) end)
  for _, place in ipairs(places) do
    local before = left
    left = max_min(min(left, bounds[place.name][1]), left, place.teams, wanted, due)
    given[place] = before - left
  end
  for _, rank in ipairs(ranks) do
    local capped, peers = {}, {}
    for name, part in pairs(due) do capped[name] = part end
    for _, place in ipairs(places) do
      if place.rank == rank then
        max_min(bounds[place.name][2] - given[place], 0.0, place.teams, wanted, capped)
        for _, name in ipairs(place.teams) do insert(peers, name) end
      end
    end
    left = max_min(left, left, peers, wanted, due, capped)
  end
  return due
end

-- column: of a team's demand in its row. Slots have bands with floor and ceiling; in the queue each team has one unit.
-- at: where a large request may go first, but for what is due to better ranks elsewhere.
local function parts_by_team(limit, column, unit, at)
  local wanted, order, bounds, parts, better = {}, {}, {}, {}, {}
  for _, name in ipairs(live) do
    parts[name], better[name] = 0.0, 0.0
    for _, team in ipairs(teams[name]) do
      if team[column] > 0 then
        local each = wanted[team[1]]
        if not each then
          each = { rank = team[2], weight = team[4], group = unit and team[1] or team[3], total = 0 }
          wanted[team[1]] = each
          insert(order, team[1])
        end
        each.total = each.total + team[column]
      end
    end
  end
  for _, name in ipairs(order) do
    local each = wanted[name]
    each.demand = unit and each.total or min(each.total, least('r:' .. name, each.total))
    if not bounds[each.group] then
      bounds[each.group] = unit and { unit, limit } or { least('o:' .. each.group, 0), least('c:' .. each.group, limit) }
    end
  end
  local due = due_by_team(limit, wanted, order, bounds)
  local large, owner, rank = first_large(at)
  for _, name in ipairs(live) do
    for _, team in ipairs(teams[name]) do
      if team[column] > 0 then
        local part = due[team[1]] * team[column] / wanted[team[1]].total
        parts[name] = parts[name] + part
        if team[2] < rank then better[name] = better[name] + part end
      end
    end
  end
  if not owner then return parts end
  large = min(limit, large)
  local others, rest = 0.0, 0.0
  for _, name in ipairs(live) do
    if name ~= owner then others, rest = others + better[name], rest + parts[name] - better[name] end
  end
  local left = limit - others - large
  if left < 0 or parts[owner] >= large then return parts end
  local kept = rest <= left and 1.0 or left / rest
  for _, name in ipairs(live) do
    parts[name] = name == owner and large or better[name] + (parts[name] - better[name]) * kept
  end
  return parts
end

local function based(name, claim)
  local before, base, since = mine and mine.claims[name], claim[1], 0
  if held then base = before and max(claim[1], min(claim[2], before[1])) or claim[1]
  elseif calm then base = max(claim[1], claim[2]) end
  if claim[5] ~= 0 then since = before and before[4] ~= 0 and before[5] or now end
  return { base, claim[3], claim[4], since ~= 0 and claim[1] + claim[5] or 0, since, claim[6] }
end

local function settle(name)
  local own, limit, leased, before, at = claims[rq.name][name], nil, 0, 0, {}
  for _, each in ipairs(names) do
    local other = claims[each][name]
    if other then
      leased = leased + other[1]
      if each ~= rq.name and replicas[each].epoch < epoch then before = before + other[1] end
      if is_live[each] then
        if not limit or other[3] < limit then limit = other[3] end
        insert(at, { each, other })
      end
    end
  end
  local reserve, kind = 0, string.sub(name, 1, 2)
  if name == 'q' or name == 'k' then reserve = floor(limit / (4 * #live)) end
  local divided, parts = limit - reserve * #live, nil
  if name == 's' then parts = parts_by_team(divided, 7, nil, at)
  elseif name == 'q' then parts = parts_by_team(divided, 8, 1.0, {})
  elseif name == 'k' then parts = parts_by_team(divided, 9, divided / max(1, rq.claims.q[4]), {})
  else parts = demanded_parts(at, limit) end
  local fair, rest, due = portion(parts, rq.name)
  for _, one in ipairs(at) do
    local lease, part, large = one[2][1], (parts[one[1]] or 0) + 1e-9, min(one[2][4], limit)
    local none = lease < 1 and one[2][2] >= 1 and parts[one[1]] and (portion(parts, one[1])) >= 1
    if none or (lease < large and large <= part) then rest = 0 end
  end
  local spare, grant, free = 0, 0, limit - leased
  if limit >= 4 * #live or (kind ~= 'r:' and kind ~= 'f:') then
    local whole, place = floor(max(0.0, limit - due) + 1e-9), 0
    for i, each in ipairs(live) do
      if each == rq.name then place = i - 1 end
    end
    spare = floor(whole / #live)
    if (place + turn) % #live < whole % #live then spare = spare + 1 end
    spare = max(reserve, spare)
  end
  if not calm and not rq.bye then grant = max(0, min(free, fair + spare - own[1])) end
  local lease = max(0, own[1] + grant + min(0, free))
  if free < 0 and kind == 'f:' then lease = max(0, min(own[1], limit - before)) end
  own[1] = own[1] + grant
  return { lease, fair, spare, rest, limit }
end

claims[rq.name] = {}
for name, claim in pairs(rq.claims) do claims[rq.name][name] = based(name, claim) end
local grants = {}
for name in pairs(rq.claims) do grants[name] = settle(name) end

local served, totals = {}, {}
if held then
  for _, team in ipairs(mine.teams) do served[team[1]] = team[5] end
end
for i, team in ipairs(rq.teams) do
  local name = team[1]
  local charged = held and team[5] - (served[name] or team[6]) or 0
  if charged ~= 0 then
    total[name] = (total[name] or 0) + charged
    redis.call('hset', key, 'v:' .. name, string.format('%.0f', total[name]))
  end
  totals[i] = total[name] or 0
end
if rq.bye and rq.claims.s[1] == 0 then redis.call('hdel', key, 'r:' .. rq.name)
else
  redis.call('hset', key, 'r:' .. rq.name, packed({ incarnation = rq.incarnation, sequence = rq.sequence, epoch = epoch,
    expiry = now + rq.ttl_ms, linger = rq.linger_ms, policy = rq.policy, use = rq.claims.s[1], claims = claims[rq.name],
    teams = rq.teams }))
end
return cmsgpack.pack({ state = 'ok', epoch = epoch, calm = calm, live = #live, busy = busy, policies = different,
  grants = grants, total = totals })
