-- Leases of gateway replicas: the transition of lease_store.py, which tests compare with this script.
-- KEYS[1]: one hash for each fleet. ARGV[1]: a request in msgpack. Returns a reply in msgpack.
-- Field `!`: run, last, calm, epoch. `r:NAME`: one replica. `v:TEAM`: tokens charged to a team at all replicas.
local key, rq = KEYS[1], cmsgpack.unpack(ARGV[1])
local time = redis.call('time')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2] then now = tonumber(ARGV[2]) end  -- tests bring a clock

local function replica(fields)  -- of its record: the order of ReplicaLease
  return { incarnation = fields[1], sequence = fields[2], epoch = fields[3], expiry = fields[4], linger = fields[5],
    policy = fields[6], use = fields[7], slots = fields[8], tokens = fields[9], teams = fields[10] }
end

local function packed(r)
  return cmsgpack.pack({ r.incarnation, r.sequence, r.epoch, r.expiry, r.linger, r.policy, r.use, r.slots, r.tokens,
    r.teams })
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

if meta[1] ~= rq.run or meta[2] < 0 or now < meta[2] or now - meta[2] > 500 then
  meta[1], meta[3], meta[4] = rq.run, now + rq.ttl_ms, math.max(meta[4], now)
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

-- A held limit is { lease, demand, limit, large, since }, a claim { use, keep, demand, limit, large }.
local others, live, is_live = {}, { rq.name }, { [rq.name] = true }
for name, each in pairs(replicas) do
  if name ~= rq.name then
    if now > each.expiry + each.linger then redis.call('hdel', key, 'r:' .. name)
    else
      table.insert(others, name)
      if now <= each.expiry then table.insert(live, name); is_live[name] = true end
    end
  end
end
table.sort(others)
table.sort(live)
local held = mine and mine.epoch == rq.epoch and now <= mine.expiry
local calm, turn = now < meta[3], math.floor(now / rq.ttl_ms)
if not held then
  meta[4] = meta[4] + 1
  redis.call('hset', key, '!', cmsgpack.pack(meta))
end

local function portion(names, parts, own)
  local whole, sum, wholes, rest, place = {}, 0.0, 0, 0, nil
  for _, name in ipairs(names) do
    whole[name] = math.floor(parts[name] + 1e-9)
    sum, wholes = sum + parts[name], wholes + whole[name]
    if parts[name] - whole[name] > 1e-9 then
      if name == own then place = rest end
      rest = rest + 1
    end
  end
  if not place then return whole[own] end
  if (place + turn) % rest < math.floor(sum + 1e-9) - wholes then return whole[own] + 1 end
  return whole[own]
end

local function demanded_parts(at, limit, demand, large)
  local reserved, owner, wanted, parts = 0, nil, demand, {}
  if large then
    reserved, owner = math.min(limit, large[3]), large[2]
    for _, one in ipairs(at) do if one[1] == owner then wanted = wanted - one[2][2] end end
  end
  local rest = limit - reserved
  for _, one in ipairs(at) do
    local name, want = one[1], one[2][2]
    if name == owner then parts[name] = reserved
    elseif wanted <= rest then parts[name] = want
    else parts[name] = rest * want / wanted end
  end
  return parts
end

local function base(claim, before)
  if held then return before and math.max(claim[1], math.min(claim[2], before[1])) or claim[1] end
  return calm and math.max(claim[1], claim[2]) or claim[1]
end

local function settle(claim, before, held_of, parts, spare_from)
  local since = 0
  if claim[5] ~= 0 then since = before and before[4] ~= 0 and before[5] or now end
  local own = { base(claim, before), claim[3], claim[4], since ~= 0 and claim[1] + claim[5] or 0, since }
  local limit, leased, demand, large, at, names = claim[4], own[1], 0, nil, {}, {}
  for _, name in ipairs(others) do
    local other = held_of(replicas[name])
    if other and other[3] >= 0 then
      leased = leased + other[1]
      if is_live[name] then limit = math.min(limit, other[3]); table.insert(at, { name, other }) end
    end
  end
  table.insert(at, { rq.name, own })
  table.sort(at, function(a, b) return a[1] < b[1] end)
  for _, one in ipairs(at) do
    local other = one[2]
    table.insert(names, one[1])
    demand = demand + other[2]
    if other[4] ~= 0 and (not large or other[5] < large[1]) then large = { other[5], one[1], other[4] } end
  end
  local free = limit - leased
  parts = parts or demanded_parts(at, limit, demand, large)
  local fair, spare, grant = portion(names, parts, rq.name), 0, 0
  if limit >= spare_from then spare = math.floor(math.max(0, limit - demand) / #live) end
  if not calm and not rq.bye then grant = math.max(0, math.min(free, fair + spare - own[1])) end
  local lease = math.max(0, own[1] + grant + math.min(0, free))
  own[1] = own[1] + grant
  return own, { lease, fair, spare }
end

local function slot_parts()
  local rows, left = {}, rq.slots[4]
  for _, name in ipairs(live) do
    if name == rq.name then
      for _, team in ipairs(rq.teams) do table.insert(rows, { name, team[1], team[2], team[3], team[5][3] }) end
    else
      left = math.min(left, replicas[name].slots[3])
      local teams = {}
      for team in pairs(replicas[name].teams) do table.insert(teams, team) end
      table.sort(teams)
      for _, team in ipairs(teams) do
        local each = replicas[name].teams[team]
        table.insert(rows, { name, team, each[1], each[2], each[4][2] })
      end
    end
  end
  local wanted, order = {}, {}
  for _, row in ipairs(rows) do
    if row[5] > 0 then
      if not wanted[row[2]] then
        wanted[row[2]] = { row[3], row[4], 0 }
        table.insert(order, row[2])
      end
      wanted[row[2]][3] = wanted[row[2]][3] + row[5]
    end
  end
  table.sort(order, function(a, b)
    local x, y = wanted[a], wanted[b]
    if x[1] ~= y[1] then return x[1] < y[1] end
    local p, q = x[3] / x[2], y[3] / y[2]
    if p ~= q then return p < q end
    return a < b
  end)
  local peers, due, parts = {}, {}, {}
  for _, team in ipairs(order) do
    local rank = wanted[team][1]
    peers[rank] = (peers[rank] or 0.0) + wanted[team][2]
  end
  for _, team in ipairs(order) do
    local rank, weight, wish = wanted[team][1], wanted[team][2], wanted[team][3]
    due[team] = math.min(wish, left * weight / peers[rank])
    left, peers[rank] = left - due[team], peers[rank] - weight
  end
  for _, name in ipairs(live) do parts[name] = 0.0 end
  for _, row in ipairs(rows) do
    if row[5] > 0 then parts[row[1]] = parts[row[1]] + due[row[2]] * row[5] / wanted[row[2]][3] end
  end
  return parts
end

local slots, slots_grant = settle(rq.slots, mine and mine.slots, function(r) return r.slots end, slot_parts(), 0)
local tokens, tokens_grant = false, { 0, 0, 0 }
if rq.tokens then
  tokens, tokens_grant = settle(rq.tokens, mine and mine.tokens, function(r) return r.tokens end, nil, 0)
end
local teams, grants, totals = {}, {}, {}
for i, team in ipairs(rq.teams) do
  local name, claim = team[1], team[5]
  local before = mine and mine.teams[name]
  if before and held then total[name] = (total[name] or 0) + team[4] - before[3]
  else total[name] = total[name] or 0 end
  redis.call('hset', key, 'v:' .. name, string.format('%.0f', total[name]))
  totals[i] = total[name]
  local running, grant = { 0, claim[3], -1, 0, 0 }, { -1, 0, 0 }
  if claim[4] >= 0 then
    running, grant = settle(claim, before and before[4], function(r) return r.teams[name] and r.teams[name][4] end, nil,
      4 * #live)
  end
  grants[i] = grant
  teams[name] = { team[2], team[3], held and team[4] or 0, running }
end
local busy, policies, seen = 0, 1, { [rq.policy] = true }
for _, name in ipairs(others) do
  local each = replicas[name]
  busy = busy + each.use
  if is_live[name] and not seen[each.policy] then seen[each.policy] = true; policies = policies + 1 end
end
local epoch = held and mine.epoch or meta[4]
if rq.bye and rq.slots[1] == 0 then redis.call('hdel', key, 'r:' .. rq.name)
else
  redis.call('hset', key, 'r:' .. rq.name, packed({ incarnation = rq.incarnation, sequence = rq.sequence, epoch = epoch,
    expiry = now + rq.ttl_ms, linger = rq.linger_ms, policy = rq.policy, use = rq.slots[1], slots = slots,
    tokens = tokens or false, teams = teams }))
end
return cmsgpack.pack({ state = 'ok', epoch = epoch, calm = calm, live = #live, busy = busy, policies = policies,
  slots = slots_grant, tokens = tokens_grant, teams = grants, total = totals })
